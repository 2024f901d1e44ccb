//! A small RESP key-value server over RDMA.
//!
//! ```text
//! cargo run --release -p rdma-conn --example kv_server -- --listen 192.0.2.1:6379    # serve on an RDMA device
//! cargo run --release -p rdma-conn --example kv_server -- --backend softsim         # no device: serve and try it here
//! ```
//!
//! Each thread (`--threads`, one by default) has an [`Endpoint`](rdma_conn::Endpoint) of its own in
//! a mio event loop, and another thread listens. Requests go to the threads in turn, and a
//! connection stays with its thread: [`Threads`].

use std::error::Error;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use any_backend::{AnyBackend, BackendName, either, softsim};
use clap::Parser;
use connection_args::Network;
use kv_store::{FrameReader, Store, Threads};
use rdma_conn::{Descriptors, Limits, Options, Stream};
use resp_rs::resp2::Frame;

#[derive(Parser)]
#[command(version, about = "A small RESP key-value server over RDMA")]
struct Arguments {
    /// Where to run. In softsim, a client here stores a key and reads it back.
    #[arg(long, value_enum, default_value_t)]
    backend: BackendName,
    /// The address of an RDMA device, and a port.
    #[arg(long, default_value = "0.0.0.0:6379")]
    listen: SocketAddr,
    /// Length of a connection's receive windows, in bytes. An idle connection has one, a busy one
    /// has two.
    #[arg(long, default_value_t = 128 << 10)]
    window: u32,
    /// Register a connection's send buffer when it is accepted. By default its first reply does,
    /// which takes milliseconds.
    #[arg(long)]
    eager: bool,
    /// Microseconds for which a waiting thread busy-polls before it sleeps. It costs a processor
    /// for as long.
    #[arg(long, default_value_t = 0)]
    spin: u64,
    /// Clients at the same time, of all threads together.
    #[arg(long, default_value_t = Limits::default().connections)]
    maxclients: usize,
    /// Threads that serve clients. A new connection goes to the next of them in turn, whatever they
    /// have to do, and stays there; all share one store behind one lock.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    #[command(flatten)]
    network: Network,
}

fn main() -> ExitCode {
    tracing_subscriber::fmt().with_env_filter(tracing_subscriber::EnvFilter::from_default_env()).init();
    rdma_program::run(|arguments: Arguments| match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kv_server: {error}");
            ExitCode::from(rdma_program::status(&*error))
        }
    })
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let mut options = arguments.network.on(Options::default());
    options.protocol.window = arguments.window;
    options.eager_send_buffer = arguments.eager;
    options.spin = Duration::from_micros(arguments.spin);
    // A client that leaves its replies unread for a minute is not coming back; free its thread.
    options.protocol.stall_limit = Some(Duration::from_secs(60));
    let limits = Limits::default().connections(arguments.maxclients);
    let store = Arc::new(Store::default());
    let is_embedded = arguments.backend == BackendName::Softsim;
    let listen = if is_embedded { ([192, 0, 2, 1], 6379).into() } else { arguments.listen };
    either!(AnyBackend::open(arguments.backend, listen.ip())?, AnyBackend(backend) => {
        let threads = Threads::start(&backend, listen, options, limits, arguments.threads, &store)?;
        if !is_embedded {
            println!("kv_server: RDMA on {}", threads.local_addr().unwrap_or(listen));
            match threads.run()? {}
        }
        std::thread::spawn(move || {
            let Err(error) = threads.run();
            eprintln!("kv_server: {error}");
        });
    });
    Ok(demonstrate(Stream::connect(&softsim([192, 0, 2, 2]), listen)?)?)
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
