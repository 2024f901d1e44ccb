//! TLS over each of the other types, and features of TLS alone.

use std::io::{self, ErrorKind, IoSlice, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rdma_server::{
    Address, ConnectionType, Interest, Kind, Listening, LoopId, SessionState, SocketSettings, Source, Tcp,
    Tls, TlsSettings, Transport,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::harness::{listening, new_loop, on_connected, on_readable, pair, run};
use crate::test_beds::{RdmaBed, TcpBed, TestBed};

pub(crate) struct TlsBed<B: TestBed> {
    inner: B,
    server: Tls<B::Type>,
    client: Tls<B::Type>,
}

impl<B: TestBed> TestBed for TlsBed<B> {
    type Type = Tls<B::Type>;

    fn new() -> Option<Self> {
        let inner = B::new()?;
        let server = Tls::new(inner.server().clone(), server_settings());
        let client = Tls::new(inner.client().clone(), client_settings(true));
        Some(Self { inner, server, client })
    }

    fn server(&self) -> &Tls<B::Type> {
        &self.server
    }

    fn client(&self) -> &Tls<B::Type> {
        &self.client
    }

    fn address(&self) -> Address {
        self.inner.address()
    }

    fn is_local(&self) -> bool {
        self.inner.is_local()
    }

    fn held(&self) -> String {
        self.inner.held()
    }
}

const AUTHORITY: &[u8] = include_bytes!("certificates/authority.pem");
const SERVER: [&[u8]; 2] =
    [include_bytes!("certificates/server.pem"), include_bytes!("certificates/server.key.pem")];
const CLIENT: [&[u8]; 2] =
    [include_bytes!("certificates/client.pem"), include_bytes!("certificates/client.key.pem")];

fn certificate(pem: &[u8]) -> CertificateDer<'static> {
    CertificateDer::from_pem_slice(pem).expect("a certificate")
}

fn trusted() -> Arc<RootCertStore> {
    let mut roots = RootCertStore::empty();
    roots.add(certificate(AUTHORITY)).expect("an authority");
    Arc::new(roots)
}

fn server_settings() -> TlsSettings {
    let provider = Arc::new(rustls_graviola::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(trusted(), Arc::clone(&provider));
    let verifier = verifier.allow_unauthenticated().build().expect("a verifier");
    let [chain, key] = SERVER;
    let key = PrivateKeyDer::from_pem_slice(key).expect("a key");
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_client_cert_verifier(verifier)
        .with_single_cert(vec![certificate(chain)], key)
        .expect("a certificate with its key");
    TlsSettings::default().server(Some(Arc::new(config)))
}

fn client_settings(with_certificate: bool) -> TlsSettings {
    let provider = Arc::new(rustls_graviola::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(trusted());
    let [chain, key] = CLIENT;
    let key = PrivateKeyDer::from_pem_slice(key).expect("a key");
    let config = if with_certificate {
        config.with_client_auth_cert(vec![certificate(chain)], key).expect("a certificate with its key")
    } else {
        config.with_no_client_auth()
    };
    let server_name = Some("server.test".try_into().expect("a name"));
    TlsSettings::default().client(Some(Arc::new(config))).server_name(server_name)
}

fn test_bed<B: TestBed>() -> TlsBed<B> {
    TlsBed::new().expect("needs no device")
}

#[test]
fn the_peers_certificate_can_be_seen() {
    let pair = pair(&test_bed::<RdmaBed>());
    let [client, server] = [pair.client, pair.server].map(|id| pair.events.get(id).expect("is there"));
    assert_eq!(client.peer_certificate(), Some(certificate(SERVER[0]).as_ref()));
    assert_eq!(server.peer_certificate(), Some(certificate(CLIENT[0]).as_ref()));
}

#[test]
fn settings_can_be_changed_under_a_listener() {
    let test_bed = test_bed::<TcpBed>();
    let mut pair = pair(&test_bed);
    test_bed.client.configure(client_settings(false)).expect("settings");
    let client = pair.events.connect(test_bed.client(), &pair.address, None, on_connected).expect("begins");
    run(&mut pair.events, |events| events.state.accepted.len() == 2 && events.state.connected.len() == 2);
    assert_eq!(pair.events.state.connected[1], (client, SessionState::Connected));
    let [old, new] = [0, 1].map(|index| pair.events.state.accepted[index]);
    assert!(pair.events.get(old).expect("is there").peer_certificate().is_some());
    assert!(pair.events.get(new).expect("is there").peer_certificate().is_none());
}

#[test]
fn a_server_with_another_name_is_not_trusted() {
    let test_bed = test_bed::<RdmaBed>();
    let settings = client_settings(true).server_name(None);
    test_bed.client.configure(settings).expect("settings");
    let (mut events, _, address) = listening(&test_bed);
    let id = events.connect(test_bed.client(), &address, None, on_connected).expect("begins");
    run(&mut events, |events| events.state.connected.len() == 1 && events.state.accepted.len() == 1);
    let connection = events.get(id).expect("is there until it is closed");
    assert_eq!(connection.state(), SessionState::Error);
    let error = connection.last_error().expect("an error");
    assert_eq!(error.kind(), ErrorKind::InvalidData);
    assert!(error.to_string().contains("certificate"), "{error}");
    let server = events.get(events.state.accepted[0]).expect("is there until it is closed");
    assert_eq!(server.state(), SessionState::Error, "{server:?}");
}

#[test]
fn who_does_not_speak_tls_is_told_to_leave() {
    let test_bed = test_bed::<TcpBed>();
    let (mut events, _, address) = listening(&test_bed);
    let id = events.connect(&Tcp::new(), &address, None, on_connected).expect("begins");
    run(&mut events, |events| !events.state.connected.is_empty());
    events.get_mut(id).expect("is there").write_all(b"PING\r\nPING\r\n").expect("room");
    run(&mut events, |events| !events.state.accepted.is_empty());
    let server = events.state.accepted[0];
    assert_eq!(events.get(server).expect("is there").state(), SessionState::Error);
    events.close(server);
    events.get_mut(id).expect("is there").set_read_handler(Some(on_readable));
    run(&mut events, |events| events.state.ended);
}

#[derive(Clone, Default)]
struct Deaf {
    inner: Tcp,
    /// The error of every write, once set.
    error: Arc<OnceLock<ErrorKind>>,
    /// Until then no write finds room.
    full: Arc<AtomicBool>,
}

impl ConnectionType for Deaf {
    type Settings = SocketSettings;

    fn kind(&self) -> Kind {
        self.inner.kind()
    }

    fn configure(&self, settings: SocketSettings) -> io::Result<()> {
        self.inner.configure(settings)
    }

    fn listen(&self, on: LoopId, at: &Address) -> io::Result<Box<dyn Listening>> {
        self.inner.listen(on, at)
    }

    fn connect(&self, on: LoopId, to: &Address, from: Option<&Address>) -> io::Result<Box<dyn Transport>> {
        Ok(Box::new(DeafTransport { inner: self.inner.connect(on, to, from)?, like: self.clone() }))
    }
}

struct DeafTransport {
    inner: Box<dyn Transport>,
    like: Deaf,
}

impl Transport for DeafTransport {
    fn kind(&self) -> Kind {
        self.inner.kind()
    }

    fn establish(&mut self) -> io::Result<bool> {
        self.inner.establish()
    }

    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.inner.read(into)
    }

    fn write(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        match self.like.error.get() {
            Some(error) => Err((*error).into()),
            None if self.like.full.load(Ordering::Relaxed) => Err(ErrorKind::WouldBlock.into()),
            None => self.inner.write(from),
        }
    }

    fn shutdown(&mut self, linger: Duration) {
        self.inner.shutdown(linger);
    }

    fn begin_close(&mut self, linger: Duration) {
        self.inner.begin_close(linger);
    }

    fn is_over(&mut self) -> bool {
        self.inner.is_over()
    }

    fn local_addr(&self) -> Option<Address> {
        self.inner.local_addr()
    }

    fn peer_addr(&self) -> Option<Address> {
        self.inner.peer_addr()
    }

    fn is_local(&self) -> bool {
        self.inner.is_local()
    }

    fn source(&self, want: Interest) -> Source<'_> {
        self.inner.source(want)
    }

    fn drive(&mut self, fired: Interest) {
        self.inner.drive(fired);
    }

    fn ready(&mut self) -> Interest {
        self.inner.ready()
    }
}

#[test]
fn a_write_that_fails_hides_nothing_that_has_come() {
    let (server, deaf) = (Tls::new(Tcp::new(), server_settings()), Deaf::default());
    let mut events = new_loop();
    let address = TcpBed::new().expect("needs no device").address();
    let listener = events.listen(&server, &address, crate::harness::accept).expect("a free address");
    let address = events.listener_addr(listener).expect("an address");
    let client = Tls::new(deaf.clone(), client_settings(true));
    let client = events.connect(&client, &address, None, on_connected).expect("begins");
    run(&mut events, |events| events.state.connected.len() == 1 && events.state.accepted.len() == 1);
    let server = events.state.accepted[0];

    deaf.full.store(true, Ordering::Relaxed);
    let connection = events.get_mut(client).expect("is there");
    assert_eq!(connection.write(b"waits in encrypted form").expect("is taken"), 23);
    deaf.error.set(ErrorKind::ConnectionReset).expect("the first");
    events.get_mut(server).expect("is there").write_all(b"hello").expect("room");
    events.get_mut(client).expect("is there").set_read_handler(Some(on_readable));
    run(&mut events, |events| events.state.read == b"hello");
    let error = events.get_mut(client).expect("is there").write(b"x").expect_err("nothing can be sent");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

/// Without TLS's `close_notify` an end may be an attack, and is an error.
#[test]
fn an_end_without_goodbye_is_an_error() {
    let mut pair = pair(&test_bed::<RdmaBed>());
    pair.events.abort(pair.client);
    let server = pair.at(pair.server);
    let error = server.sync_read(&mut [0; 1], crate::harness::PATIENCE).expect_err("the end");
    assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
    assert_eq!(server.state(), SessionState::Error);
}

#[test]
fn settings_that_are_missing_are_named() {
    let tls = Tls::new(Tcp::new(), TlsSettings::default());
    let mut events = new_loop();
    let address = TcpBed::new().expect("needs no device").address();
    let error = events.connect(&tls, &address, None, on_connected).expect_err("no client configuration");
    assert!(error.to_string().contains("client configuration"), "{error}");
    let error = events.listen(&tls, &address, on_connected).expect_err("no server configuration");
    assert!(error.to_string().contains("server configuration"), "{error}");
}
