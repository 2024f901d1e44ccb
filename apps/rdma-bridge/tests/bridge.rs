//! TCP clients and a TCP server, with RDMA between them: delivery, ends, and refusals.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use kv_store::Store;
use rdma_bridge::{Bridge, Counters, Place, Settings, Snapshot, TlsFiles};
use rdma_softsim::{Fabric, SoftSim};
use redis::{AsyncCommands, AsyncConnectionConfig};
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, spawn_blocking};

const LIMIT: Duration = Duration::from_secs(30);
const LOOPBACK: &str = "tcp://127.0.0.1:0";
const MIDDLE: &str = "rdma://192.0.2.2:6379";
const PING: &[u8] = b"*1\r\n$4\r\nPING\r\n";

fn place(text: &str) -> Place {
    text.parse().expect("a place")
}

fn host() -> SoftSim {
    Fabric::new().host(&[[192, 0, 2, 1].into()])
}

fn server(serve: impl Fn(TcpStream) + Send + Sync + 'static) -> Place {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    let serve = Arc::new(serve);
    thread::spawn(move || {
        for client in listener.incoming() {
            let (client, serve) = (client.expect("a client"), Arc::clone(&serve));
            thread::spawn(move || serve(client));
        }
    });
    place(&format!("tcp://{address}"))
}

fn store() -> Place {
    let store = Store::default();
    server(move |client| {
        client.set_nodelay(true).expect("a socket");
        // A client that leaves in the middle is no failure of the store.
        let _left = store.serve(client);
    })
}

/// A bridge from TCP to RDMA, and one from RDMA to the server.
struct Chain {
    address: SocketAddr,
    counters: Arc<Counters>,
    stop: Option<oneshot::Sender<()>>,
    serving: JoinHandle<()>,
}

impl Chain {
    async fn new(server: Place, settings: &Settings) -> Self {
        let fabric = Fabric::new();
        let [near, far] = [[192, 0, 2, 1], [192, 0, 2, 2]].map(|address| fabric.host(&[address.into()]));
        let middle = place(MIDDLE);
        let theirs = changed(|theirs| theirs.stall = settings.stall);
        let second = Bridge::bind(&far, &middle, server, &theirs).await.expect("a port");
        tokio::spawn(second.serve(std::future::pending()));
        Self::of(&near, middle, settings).await
    }

    async fn of(backend: &SoftSim, server: Place, settings: &Settings) -> Self {
        let bridge = Bridge::bind(backend, &place(LOOPBACK), server, settings).await.expect("a port");
        let place = bridge.place().expect("bound");
        let address = SocketAddr::new(place.host.parse().expect("an address"), place.port);
        let counters = bridge.counters();
        let (stop, stopped) = oneshot::channel();
        let serving = tokio::spawn(async {
            bridge.serve(async { drop(stopped.await) }).await.expect("nothing befell the listener");
        });
        Self { address, counters, stop: Some(stop), serving }
    }

    fn connect(&self) -> TcpStream {
        let client = TcpStream::connect(self.address).expect("the bridge listens");
        client.set_read_timeout(Some(LIMIT)).expect("a socket");
        client
    }

    async fn until(&self, reached: impl Fn(&Snapshot) -> bool) {
        let look = async {
            while !reached(&self.counters.snapshot()) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        if tokio::time::timeout(LIMIT, look).await.is_err() {
            panic!("still {}", self.counters.snapshot());
        }
    }
}

async fn rest(mut client: TcpStream) -> std::io::Result<Vec<u8>> {
    let read = move || {
        let mut bytes = Vec::new();
        client.read_to_end(&mut bytes).map(|_| bytes)
    };
    spawn_blocking(read).await.expect("no panic")
}
fn ping(client: &mut TcpStream) {
    client.write_all(PING).expect("written");
    let mut pong = [0; 7];
    client.read_exact(&mut pong).expect("served");
}

/// More than the half second that redis-rs waits by default, for a busy machine.
fn patient() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new().set_response_timeout(Some(LIMIT)).set_connection_timeout(Some(LIMIT))
}

fn changed(change: impl FnOnce(&mut Settings)) -> Settings {
    let mut settings = Settings::default();
    change(&mut settings);
    settings
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_of_tcp_reach_a_server_over_rdma() {
    let chain = Chain::new(store(), &Settings::default()).await;
    let client = redis::Client::open(format!("redis://{}", chain.address)).expect("a URL");
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..20_usize {
        let client = client.clone();
        tasks.spawn(async move {
            let mut connection =
                client.get_multiplexed_async_connection_with_config(&patient()).await.expect("connects");
            // Values around the sizes of windows and buffers, with all bytes compared.
            for size in [0, 1, 32 << 10, (1 << 20) - 1, (1 << 20) + number] {
                let value: Vec<u8> = (0..size).map(|at| (at * 31 + number) as u8).collect();
                let key = format!("key:{number}:{size}");
                let () = connection.set(&key, &value).await.expect("stored");
                let back: Vec<u8> = connection.get(&key).await.expect("read");
                assert!(back == value, "{key}");
            }
        });
    }
    while let Some(task) = tasks.join_next().await {
        task.expect("no panic");
    }
    chain.until(|now| now.ended == 20 && now.open == 0).await;
    let now = chain.counters.snapshot();
    assert_eq!((now.accepted, now.failed, now.refused, now.unreachable), (20, 0, 0, 0), "{now}");
    assert!(now.forward > 20 << 21 && now.backward > 20 << 21, "{now}");
}

/// `printf … | nc -N`: the client ends its own direction at once, and keeps reading.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_ends_its_own_direction_gets_every_reply() {
    let chain = Chain::new(store(), &changed(|settings| settings.quiet = Duration::from_secs(3))).await;
    let mut client = chain.connect();
    client.write_all(&PING.repeat(1000)).expect("written");
    client.shutdown(Shutdown::Write).expect("a socket");
    let replies = rest(client).await.expect("an orderly end");
    assert_eq!(replies, b"+PONG\r\n".repeat(1000));
    chain.until(|now| now.ended == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_ends_is_heard_to_its_last_byte() {
    let last = server(|mut client| {
        let mut first = [0; 1];
        client.read_exact(&mut first).expect("a byte");
        client.write_all(&[b'x'; 300_000]).expect("written");
        client.shutdown(Shutdown::Write).expect("a socket");
        // Keeps reading, so that its own end is orderly.
        let _ended = std::io::copy(&mut client, &mut std::io::sink());
    });
    let chain = Chain::new(last, &Settings::default()).await;
    let mut client = chain.connect();
    client.write_all(b"1234567890").expect("written");
    assert_eq!(rest(client).await.expect("an orderly end").len(), 300_000);
    chain.until(|now| now.ended == 1).await;
}

/// A broken server connection must not look like an orderly end.
#[tokio::test(flavor = "multi_thread")]
async fn a_reset_travels() {
    let broken = server(|mut client| {
        client.write_all(b"$100\r\nhalf of a").expect("written");
        let mut first = [0; 1];
        client.read_exact(&mut first).expect("a byte");
        let socket = socket2::SockRef::from(&client);
        socket.set_linger(Some(Duration::ZERO)).expect("a socket");
    });
    let chain = Chain::of(&host(), broken, &Settings::default()).await;
    let mut client = chain.connect();
    let mut half = [0; 15];
    client.read_exact(&mut half).expect("half of a reply");
    client.write_all(b"1").expect("written");
    let error = rest(client).await.expect_err("a reset");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    chain.until(|now| now.failed == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_client_too_many_is_told_so() {
    let chain = Chain::new(store(), &changed(|settings| settings.max_connections = 1)).await;
    let mut first = chain.connect();
    ping(&mut first);
    let second = chain.connect();
    assert_eq!(rest(second).await.expect("an end"), b"-ERR max number of clients reached\r\n");
    drop(first);
    chain.until(|now| now.open == 0).await;
    let third = chain.connect();
    (&third).write_all(b"*1\r\n$4\r\nQUIT\r\n").expect("written");
    assert_eq!(rest(third).await.expect("an end"), b"+OK\r\n");
    assert_eq!(chain.counters.snapshot().refused, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_sees_an_end_where_there_is_no_server() {
    let chain = Chain::of(&host(), place(MIDDLE), &Settings::default()).await;
    let client = chain.connect();
    (&client).write_all(PING).expect("written");
    assert_eq!(rest(client).await.expect("an end in order"), b"", "nothing that a client takes for a reply");
    chain.until(|now| now.unreachable == 1).await;
    let client = redis::Client::open(format!("redis://{}", chain.address)).expect("a URL");
    let error = client
        .get_multiplexed_async_connection_with_config(&patient())
        .await
        .map(drop)
        .expect_err("no server");
    assert!(error.is_io_error() || error.is_connection_dropped(), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_never_reads_is_ended() {
    let stopped = Arc::new(AtomicBool::new(false));
    let noted = Arc::clone(&stopped);
    let endless = server(move |mut client| {
        while client.write_all(&[b'x'; 65536]).is_ok() {}
        noted.store(true, Ordering::Release);
    });
    let short = changed(|settings| settings.stall = Duration::from_millis(300));
    let chain = Chain::new(endless, &short).await;
    let client = chain.connect();
    chain.until(|now| now.failed == 1).await;
    while !stopped.load(Ordering::Acquire) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drop(client);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_that_ends_lets_its_clients_finish() {
    let mut chain = Chain::new(store(), &Settings::default()).await;
    let mut client = chain.connect();
    ping(&mut client);
    chain.stop.take().expect("not stopped yet").send(()).expect("it serves");
    while TcpStream::connect(chain.address).is_ok() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    ping(&mut client);
    drop(client);
    tokio::time::timeout(LIMIT, chain.serving).await.expect("ends").expect("no panic");
    assert_eq!(chain.counters.snapshot().open, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_that_has_waited_ends_its_clients() {
    let mut chain =
        Chain::new(store(), &changed(|settings| settings.drain = Duration::from_millis(50))).await;
    let mut client = chain.connect();
    ping(&mut client);
    chain.stop.take().expect("not stopped yet").send(()).expect("it serves");
    tokio::time::timeout(LIMIT, &mut chain.serving).await.expect("ends").expect("no panic");
    // Not an orderly end, which could be one in the middle of a reply.
    assert_eq!(rest(client).await.expect_err("a reset").kind(), std::io::ErrorKind::ConnectionReset);
}

fn with_tls() -> Settings {
    let file = |name: &str| [env!("CARGO_MANIFEST_DIR"), "/tests/certificates/", name].concat().into();
    changed(|settings| {
        settings.tls = TlsFiles {
            identity: Some((file("server.pem"), file("server.key.pem"))),
            authorities: Some(file("authority.pem")),
        };
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_of_tls_reach_a_server_of_tls() {
    let backend = host();
    let bind = |listen: Place, connect: Place| {
        let backend = backend.clone();
        async move {
            let bridge = Bridge::bind(&backend, &listen, connect, &with_tls()).await.expect("a port");
            let place = bridge.place().expect("bound");
            tokio::spawn(bridge.serve(std::future::pending()));
            place
        }
    };
    // Outwards: TLS to TCP, RDMA to TLS, TLS to RDMA, and TCP to TLS for a client without TLS.
    let server = bind(place("tls://127.0.0.1:0"), store()).await;
    let middle = bind(place("rdma://192.0.2.1:6379"), named(&server)).await;
    let client = bind(place("tls://127.0.0.1:0"), middle).await;
    let plain = bind(place(LOOPBACK), named(&client)).await;
    let client = redis::Client::open(format!("redis://{}:{}", plain.host, plain.port)).expect("a URL");
    let mut connection =
        client.get_multiplexed_async_connection_with_config(&patient()).await.expect("connects");
    let value = vec![7_u8; 3 << 20];
    let () = connection.set("key", &value).await.expect("stored");
    assert!(connection.get::<_, Vec<u8>>("key").await.expect("read") == value);
}

fn named(place: &Place) -> Place {
    Place { host: "localhost".into(), ..place.clone() }
}

#[tokio::test]
async fn what_is_missing_for_tls_is_named() {
    let (backend, secure, rdma) = (host(), place("tls://127.0.0.1:0"), place(MIDDLE));
    for (listen, connect, message) in [
        (&secure, &rdma, "tls://127.0.0.1:0 needs a certificate with its key"),
        (&rdma, &secure, "tls://127.0.0.1:0 needs the authorities that its server is certified by"),
    ] {
        let bound = Bridge::bind(&backend, listen, connect.clone(), &Settings::default()).await;
        assert_eq!(bound.err().expect("refused").to_string(), message);
    }
}

fn exchange(address: SocketAddr, len: usize) -> TcpStream {
    let mut client = TcpStream::connect(address).expect("the bridge listens");
    let value = vec![b'v'; len];
    let head = format!("*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n${len}\r\n");
    let get = b"\r\n*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n";
    for bytes in [head.as_bytes(), &value, get] {
        client.write_all(bytes).expect("written");
    }
    let mut replies = vec![0; format!("+OK\r\n${len}\r\n\r\n").len() + len];
    client.read_exact(&mut replies).expect("replies");
    client
}

/// Whatever went through a connection, the bridge keeps at most 64 KiB for it while it is idle.
#[test]
fn an_idle_connection_keeps_little() {
    const CLIENTS: usize = 3;
    // Only the bridges run on the counted thread, not the clients and the server.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let backend = host();
    let bind = |listen: &str, connect: Place| {
        let (listen, settings) = (place(listen), with_tls());
        let bridge = runtime.block_on(Bridge::bind(&backend, &listen, connect, &settings)).expect("a port");
        let (place, counters) = (bridge.place().expect("bound"), bridge.counters());
        runtime.spawn(bridge.serve(std::future::pending()));
        (place, counters)
    };
    let (secure, behind) = bind("tls://127.0.0.1:0", store());
    for (kept, connect) in [(64 << 10, store()), (2 * (64 << 10), named(&secure))] {
        let (near, counters) = bind(LOOPBACK, connect);
        let address = SocketAddr::new(near.host.parse().expect("an address"), near.port);
        let clients = |len| {
            let all = move || [(); CLIENTS].map(|()| exchange(address, len));
            runtime.block_on(async { spawn_blocking(all).await })
        };
        // The first clients cause allocations that are shared by all.
        drop(clients(1).expect("no panic"));
        runtime.block_on(async {
            while counters.snapshot().open + behind.snapshot().open > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        let mut idle = None;
        let counted = allocation_counter::measure(|| idle = Some(clients(16 << 20).expect("no panic")));
        let each = counted.bytes_current / CLIENTS as i64;
        println!("{each} bytes for each idle connection");
        assert!(each <= kept, "{each} bytes for each idle connection");
        drop(idle);
    }
}

fn started(arguments: &[&str]) -> (std::process::Child, impl std::io::BufRead + use<>, String) {
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_valkey-rdma-bridge"))
        .args(arguments)
        .env_remove("RUST_LOG")
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut output = std::io::BufReader::new(child.stdout.take().expect("piped"));
    let mut said = String::new();
    std::io::BufRead::read_line(&mut output, &mut said).expect("text");
    (child, output, said)
}

/// Starts the program. Returns where it listens, and its standard error until it ends by SIGTERM.
fn program(listen: &str, connect: &str) -> (String, String) {
    let (child, mut output, mut said) = started(&["--softsim", "--listen", listen, "--connect", connect]);
    let id = child.id().to_string();
    let killed = std::process::Command::new("kill").arg(id).status().expect("kill is there");
    assert!(killed.success());
    output.read_to_string(&mut said).expect("text");
    let errors = child.wait_with_output().expect("it ends");
    assert!(errors.status.success(), "{errors:?}");
    (said, String::from_utf8(errors.stderr).expect("text"))
}

/// The addresses of this machine, as hosts of a URL: the one that its route to others leaves from,
/// and those of IPv6, link-local ones with their scope.
fn own_addresses() -> Vec<String> {
    let mut own = Vec::new();
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").expect("a socket");
    match socket.connect("203.0.113.1:1").and_then(|()| socket.local_addr()) {
        Ok(address) => own.push(address.ip().to_string()),
        Err(error) => println!("skipped: this machine has no way to others by IPv4: {error}"),
    }
    // Its format is that of proc(5): the digits, the index, three more numbers, and the name.
    let lines = std::fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
    for fields in lines.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()) {
        let address = std::net::Ipv6Addr::from(u128::from_str_radix(fields[0], 16).expect("an address"));
        let scope = if address.is_unicast_link_local() { format!("%{}", fields[5]) } else { String::new() };
        own.push(format!("[{address}{scope}]"));
    }
    own
}

/// A server admits all clients of a bridge whose route to it leads back to its machine.
#[test]
fn a_way_past_protected_mode_is_warned_of() {
    let hosts = ["127.0.0.1", "127.0.0.2", "localhost", "0.0.0.0", "[::ffff:127.0.0.1]"].map(String::from);
    let mut ways: Vec<_> =
        hosts.into_iter().chain(own_addresses()).map(|host| ("0.0.0.0", host, true)).collect();
    ways.push(("127.0.0.1", "127.0.0.1".into(), false));
    ways.push(("0.0.0.0", "203.0.113.1".into(), false));
    if std::net::UdpSocket::bind("[::1]:0").is_ok() {
        ways.push(("[::]", "[::1]".into(), true));
        ways.push(("[::1]", "[::1]".into(), false));
        ways.push(("[::]", "[2001:db8::1]".into(), false));
    } else {
        println!("skipped: this machine has no IPv6");
    }
    for (listen, host, warned) in ways {
        let (said, errors) = program(&format!("tcp://{listen}:0"), &format!("tcp://{host}:6379"));
        assert!(said.starts_with("listening on tcp://"), "{said}");
        let told = errors.contains("protected mode") && errors.contains("requirepass");
        assert_eq!(told, warned, "{listen} to {host}: {errors}");
        let longest = said.lines().chain(errors.lines().filter(|line| line.starts_with("warning")));
        assert!(longest.clone().all(|line| line.len() <= 120), "{said}{errors}");
    }
}

/// VR-SEC-008: over RDMA a server goes by the path, at every address of its machine.
#[tokio::test]
async fn a_server_over_rdma_on_this_machine_is_here() {
    let own = ["192.0.2.1", "2001:db8::1", "fe80::1", "127.0.0.1"].map(|ip| ip.parse().expect("an address"));
    let fabric = Fabric::new();
    let (machine, _other) = (fabric.host(&own), fabric.host(&[[192, 0, 2, 2].into()]));
    let ways = [
        ("192.0.2.1", true),
        ("[2001:db8::1]", true),
        ("[fe80::1]", true),
        ("127.0.0.1", true),
        ("192.0.2.2", false),
    ];
    for (host, here) in ways {
        let server = place(&format!("rdma://{host}:6379"));
        let exposed = place("tcp://0.0.0.0:0");
        let bridge = Bridge::bind(&machine, &exposed, server, &Settings::default()).await.expect("a port");
        assert_eq!((bridge.is_exposed().expect("bound"), bridge.is_server_here()), (true, here), "{host}");
    }
}

#[test]
fn a_missing_device_is_named_for_what_it_is_for() {
    let arguments = ["--listen", LOOPBACK, "--connect", "rdma://192.0.2.1:6379"];
    let (mut child, _output, line) = started(&arguments);
    if !line.is_empty() {
        println!("skipped: there is an RDMA device, and nothing is missing");
        child.kill().expect("it runs");
        child.wait().expect("it ends");
        return;
    }
    let ended = child.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&ended.stderr).replace('\n', " ");
    assert_eq!(ended.status.code(), Some(69), "{said}");
    assert!(said.contains("`softrdma run --`") && !said.contains("cannot listen"), "{said}");
}

#[test]
fn no_password_of_an_argument_is_printed() {
    let (child, _output, _none) =
        started(&["--listen", LOOPBACK, "--connect", "rdma://user:s3cret@192.0.2.1:6379"]);
    let output = child.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(64) && said.contains("192.0.2.1"), "{said}");
    assert!(!said.contains("s3cret"), "{said}");
}
