//! A small RESP key-value server over RDMA.
//!
//! ```text
//! cargo run --release -p rdma-conn --example kv_server -- --listen 192.0.2.1:6379    # serve on an RDMA device
//! cargo run --release -p rdma-conn --example kv_server -- --backend softsim         # no device: serve and try it here
//! ```
//!
//! One thread for all clients: an [`Endpoint`] in a mio event loop.

use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use clap::{Parser, ValueEnum};
use kv_store::{FrameReader, Server, Store};
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use rdma_conn::{Descriptors, Endpoint, Limits, Options, Stream};
use rdma_softsim::Fabric;
use rdma_verbs::Verbs;
use resp_rs::resp2::Frame;

#[derive(Parser)]
#[command(about = "A small RESP key-value server over RDMA")]
struct Arguments {
    /// Where to run.
    #[arg(long, value_enum, default_value = "verbs")]
    backend: Backend,
    /// The address of an RDMA device, and a port.
    #[arg(long, default_value = "0.0.0.0:6379")]
    listen: SocketAddr,
    /// Length of a connection's receive windows, in bytes. An idle connection has one, a busy one has two.
    #[arg(long, default_value_t = 128 << 10)]
    window: u32,
    /// Clients at the same time.
    #[arg(long, default_value_t = Limits::default().connections)]
    maxclients: usize,
}

#[derive(Clone, Copy, ValueEnum)]
enum Backend {
    /// librdmacm and libibverbs.
    Verbs,
    /// An RDMA fabric inside this process, with a client that stores a key and reads it back.
    Softsim,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt().with_env_filter(tracing_subscriber::EnvFilter::from_default_env()).init();
    let arguments = Arguments::parse();
    let mut options = Options::server();
    options.protocol.window = arguments.window;
    // A client that lets its replies lie for a minute is not coming back; its thread is needed.
    options.protocol.stall_limit = Some(Duration::from_secs(60));
    let limits = Limits::default().connections(arguments.maxclients);
    match arguments.backend {
        Backend::Verbs => {
            let mut endpoint = Endpoint::new(&Verbs::load()?, limits)?;
            let listener = endpoint.listen(arguments.listen, options)?;
            println!("kv_server: RDMA on {}", endpoint.local_addr(listener).unwrap_or(arguments.listen));
            serve(endpoint)
        }
        Backend::Softsim => {
            let fabric = Fabric::new();
            let address = SocketAddr::from(([192, 0, 2, 1], 6379));
            let mut endpoint = Endpoint::new(&fabric.host(&[address.ip()]), limits)?;
            endpoint.listen(address, options)?;
            std::thread::spawn(move || {
                if let Err(error) = serve(endpoint) {
                    eprintln!("kv_server: {error}");
                }
            });
            let client = Stream::connect(&fabric.host(&[[192, 0, 2, 2].into()]), address)?;
            Ok(demonstrate(client)?)
        }
    }
}

/// Serves for ever. Other sources of events would be registered beside the endpoint.
fn serve<B: Descriptors>(endpoint: Endpoint<B>) -> Result<(), Box<dyn std::error::Error>> {
    let mut poll = Poll::new()?;
    poll.registry().register(&mut SourceFd(&endpoint.as_fd().as_raw_fd()), Token(0), Interest::READABLE)?;
    let store = Store::default();
    let mut server = Server::new(endpoint, &store);
    let mut events = Events::with_capacity(1);
    loop {
        server.turn()?;
        let due = server.endpoint.next_timeout().map(|at| at.since(server.endpoint.now()));
        if let Err(error) = poll.poll(&mut events, due)
            && error.kind() != std::io::ErrorKind::Interrupted
        {
            return Err(error.into());
        }
    }
}

fn demonstrate<B: Descriptors>(client: Stream<B>) -> std::io::Result<()> {
    use std::io::Write;

    let mut client = FrameReader::new(client);
    for command in ["SET greeting hello\r\n", "GET greeting\r\n", "QUIT\r\n"] {
        client.stream().write_all(command.as_bytes())?;
        let reply = client.frame()?;
        println!("{} -> {}", command.trim(), reply.as_ref().and_then(Frame::as_str).unwrap_or("?"));
    }
    Ok(())
}
