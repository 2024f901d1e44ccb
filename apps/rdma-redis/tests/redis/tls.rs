use std::net::SocketAddr;
use std::sync::Arc;

use kv_store::Store;
use rdma_conn::Listener;
use rdma_redis::{Client, Transport};
use rdma_softsim::{Fabric, SoftSim};
use redis::{AsyncCommands, ErrorKind};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore, ServerConfig, ServerConnection, StreamOwned};

/// From the bridge's tests: an authority, and a certificate for `localhost` that it signed.
const CERTIFICATES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../rdma-bridge/tests/certificates");
const URL: &str = "valkeys+rdma://localhost:6379?timeout=5";

fn certificate(name: &str) -> CertificateDer<'static> {
    CertificateDer::from_pem_file(format!("{CERTIFICATES}/{name}.pem")).expect("a certificate")
}

fn served() -> SoftSim {
    let provider = Arc::new(rustls_graviola::default_provider());
    let key = PrivateKeyDer::from_pem_file(format!("{CERTIFICATES}/server.key.pem")).expect("a key");
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("known versions")
        .with_no_client_auth()
        .with_single_cert(vec![certificate("server")], key)
        .expect("they belong together");
    let config = Arc::new(config);
    let fabric = Fabric::new();
    let address = SocketAddr::from(([127, 0, 0, 1], 6379));
    let listener = Listener::bind(&fabric.host(&[address.ip()]), address).expect("a free address");
    std::thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            let connection = ServerConnection::new(Arc::clone(&config)).expect("a usable configuration");
            std::thread::spawn(move || Store::default().serve(StreamOwned::new(connection, stream)));
        }
    });
    fabric.host(&[[192, 0, 2, 2].into()])
}

fn trusting(authorities: &[&str]) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(authorities.iter().map(|name| certificate(name)));
    let config = ClientConfig::builder_with_provider(Arc::new(rustls_graviola::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("known versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    Arc::new(config)
}

#[tokio::test]
async fn values_go_through_tls_over_rdma() {
    let client = Client::open(served(), URL)
        .expect("a valid URL")
        .with_tls(trusting(&["authority"]))
        .expect("a URL with TLS");
    let mut connection = client.get_multiplexed_async_connection().await.expect("connects");
    let value = vec![b'v'; 300_000];
    let () = connection.set("key", &value).await.expect("SET");
    assert!(connection.get::<_, Vec<u8>>("key").await.expect("GET") == value);
    assert_eq!(client.transport(), Some(Transport::Rdma));
}

#[tokio::test]
async fn a_server_without_a_trusted_certificate_is_refused() {
    let client =
        Client::open(served(), URL).expect("a valid URL").with_tls(trusting(&[])).expect("a URL with TLS");
    let error = client.get_multiplexed_async_connection().await.expect_err("its certificate is not trusted");
    assert!(error.to_string().contains("invalid peer certificate"), "{error}");
}

#[tokio::test]
async fn tls_is_never_left_out_quietly() {
    let client = Client::open(served(), URL).expect("a valid URL");
    let error = client.get_multiplexed_async_connection().await.expect_err("no configuration");
    assert_eq!(error.kind(), ErrorKind::InvalidClientConfig, "{error}");
    let plain = Client::open(served(), "valkey+rdma://localhost:6379").expect("a valid URL");
    let error = plain.with_tls(trusting(&["authority"])).expect_err("a URL without TLS");
    assert_eq!(error.kind(), ErrorKind::InvalidClientConfig, "{error}");
}
