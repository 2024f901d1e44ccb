use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rdma_server::{Address, Carrier, ConnectionType, Rdma, Tcp, Unix};
use rdma_softsim::{Fabric, SoftSim};
use rdma_verbs::Verbs;

pub(crate) trait TestBed: Sync {
    type Type: ConnectionType + Clone + Send + Sync + 'static;

    /// `None`, with the reason printed, if the type cannot be tried.
    fn new() -> Option<Self>
    where
        Self: Sized;

    fn server(&self) -> &Self::Type;

    fn client(&self) -> &Self::Type {
        self.server()
    }

    fn address(&self) -> Address;

    fn is_local(&self) -> bool {
        true
    }

    /// Returns resources of connections, in numbers that are constant without any.
    fn held(&self) -> String {
        String::new()
    }
}

#[derive(Default)]
pub(crate) struct TcpBed(Tcp);

impl TestBed for TcpBed {
    type Type = Tcp;

    fn new() -> Option<Self> {
        Some(Self::default())
    }

    fn server(&self) -> &Tcp {
        &self.0
    }

    fn address(&self) -> Address {
        SocketAddr::from(([127, 0, 0, 1], 0)).into()
    }
}

pub(crate) struct UnixBed {
    unix: Unix,
    directory: PathBuf,
    next: AtomicU32,
}

impl TestBed for UnixBed {
    type Type = Unix;

    fn new() -> Option<Self> {
        static BEDS: AtomicU32 = AtomicU32::new(0);
        let name = format!("rdma-conn-{}-{}", std::process::id(), BEDS.fetch_add(1, Ordering::Relaxed));
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir(&directory).expect("a directory of our own");
        Some(Self { unix: Unix::new(), directory, next: AtomicU32::new(0) })
    }

    fn server(&self) -> &Unix {
        &self.unix
    }

    fn address(&self) -> Address {
        self.directory.join(self.next.fetch_add(1, Ordering::Relaxed).to_string()).into()
    }

    fn held(&self) -> String {
        format!("{} files", std::fs::read_dir(&self.directory).expect("our directory").count())
    }
}

impl Drop for UnixBed {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.directory).expect("our directory");
    }
}

pub(crate) struct RdmaBed {
    fabric: Fabric,
    server: Rdma<SoftSim>,
    client: Rdma<SoftSim>,
}

const SERVER: [u8; 4] = [192, 0, 2, 1];
const CLIENT: [u8; 4] = [192, 0, 2, 2];

impl TestBed for RdmaBed {
    type Type = Rdma<SoftSim>;

    fn new() -> Option<Self> {
        let fabric = Fabric::new();
        let [server, client] = [SERVER, CLIENT].map(|ip| Rdma::new(fabric.host(&[ip.into()])));
        Some(Self { fabric, server, client })
    }

    fn server(&self) -> &Rdma<SoftSim> {
        &self.server
    }

    fn client(&self) -> &Rdma<SoftSim> {
        &self.client
    }

    fn address(&self) -> Address {
        SocketAddr::from((SERVER, 0)).into()
    }

    fn is_local(&self) -> bool {
        false
    }

    fn held(&self) -> String {
        format!("{:?}", [SERVER, CLIENT].map(|ip| self.fabric.resources(ip.into())))
    }
}

pub(crate) struct VerbsBed {
    verbs: Rdma<Verbs>,
    ip: IpAddr,
    /// One at a time: soft-RoCE in an emulated machine is slow enough with one.
    _alone: MutexGuard<'static, ()>,
}

impl TestBed for VerbsBed {
    type Type = Rdma<Verbs>;

    fn new() -> Option<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        let verbs = Verbs::load().map_err(|error| format!("no RDMA device: {error}"));
        let ip = std::env::var("LAB_IP4")
            .map_err(|_| "LAB_IP4 is not set, the address of an RDMA device".to_owned());
        match verbs.and_then(|verbs| Ok((verbs, ip?))) {
            Ok((verbs, ip)) => Some(Self {
                verbs: Rdma::new(verbs),
                ip: ip.parse().expect("an address"),
                _alone: ALONE.lock().unwrap_or_else(PoisonError::into_inner),
            }),
            Err(reason) => {
                assert!(std::env::var_os("REQUIRE_RDMA").is_none_or(|value| value != "1"), "{reason}");
                println!("skipped: {reason}");
                None
            }
        }
    }

    fn server(&self) -> &Rdma<Verbs> {
        &self.verbs
    }

    fn address(&self) -> Address {
        SocketAddr::from((self.ip, 0)).into()
    }
}

/// Returns whether the system connects a client before the server has accepted.
pub(crate) fn connects_by_itself(test_bed: &impl TestBed) -> bool {
    let kind = test_bed.server().kind();
    kind.carrier != Carrier::Rdma && !kind.tls
}
