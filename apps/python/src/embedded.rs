//! Stores inside this process, each on a fabric of its own, for trying out without a server.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use kv_store::Store;
use rdma_conn::Listener;
use rdma_softsim::{Fabric, SoftSim};

use crate::server::Refusal;
use crate::wire::lock;

pub(crate) const ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 6379);

/// How long a store waits after it could not accept a connection.
const REST: Duration = Duration::from_millis(10);

const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2));

#[derive(Clone)]
struct Embedded {
    store: Arc<Store>,
    clients: SoftSim,
}

/// The stores by name. They last as long as the process.
static STORES: Mutex<Option<HashMap<String, Embedded>>> = Mutex::new(None);

fn store(name: &str) -> Result<Embedded, Refusal> {
    // In a forked child the stores have no threads, and one may have held the lock.
    if rdma_process::is_child() {
        return Err(rdma_process::FORKED.into());
    }
    let mut stores = lock(&STORES);
    let stores = stores.get_or_insert_default();
    if let Some(embedded) = stores.get(name) {
        return Ok(embedded.clone());
    }
    let fabric = Fabric::new();
    let listener = Listener::bind(&fabric.host(&[ADDRESS.ip()]), ADDRESS)?;
    let embedded = Embedded { store: Arc::default(), clients: fabric.host(&[CLIENT]) };
    let store = Arc::clone(&embedded.store);
    thread::Builder::new().name(format!("embedded {name}")).spawn(move || {
        loop {
            let Ok((stream, _)) = listener.accept() else {
                // No descriptor or memory is left for this client, which gets an error
                // (`Listener::try_accept`).
                thread::sleep(REST);
                continue;
            };
            let store = Arc::clone(&store);
            // The thread ends with the client. A client without a thread is not served.
            let _served = thread::Builder::new().spawn(move || store.serve(stream));
        }
    })?;
    stores.insert(name.into(), embedded.clone());
    Ok(embedded)
}

/// Returns the clients' machine on the fabric of this store.
pub(crate) fn host(name: &str) -> Result<SoftSim, Refusal> {
    Ok(store(name)?.clients)
}

/// Serves this store over TCP, too, at a free port of the loopback. Returns the address.
pub(crate) fn serve_tcp(name: &str) -> Result<SocketAddr, Refusal> {
    let store = store(name)?.store;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    thread::Builder::new().name(format!("embedded {name} tcp")).spawn(move || {
        for stream in listener.incoming().flatten() {
            let store = Arc::clone(&store);
            let _served = thread::Builder::new().spawn(move || -> io::Result<()> {
                stream.set_nodelay(true)?;
                store.serve(stream)
            });
        }
    })?;
    Ok(address)
}
