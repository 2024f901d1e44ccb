//! A small RESP key-value server over RDMA.
//!
//! ```text
//! cargo run --release -p rdma-conn --example kv_server -- --listen 192.0.2.1:6379    # serve on an RDMA device
//! cargo run --release -p rdma-conn --example kv_server -- --backend softsim         # no device: serve and try it here
//! ```
//!
//! One thread per client, each with a blocking [`Stream`].

#![allow(unreachable_pub, reason = "nothing is reachable from outside a program")]

mod kv;
mod resp;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use rdma_conn::{Config, Descriptors, Listener, Options, Stream};
use rdma_softsim::Fabric;
use rdma_verbs::Verbs;
use resp_rs::resp2::Frame;

use kv::Store;
use resp::FrameReader;

#[derive(Parser)]
#[command(about = "A small RESP key-value server over RDMA")]
struct Arguments {
    /// Where to run.
    #[arg(long, value_enum, default_value = "verbs")]
    backend: Backend,
    /// The address of an RDMA device, and a port.
    #[arg(long, default_value = "0.0.0.0:6379")]
    listen: SocketAddr,
    /// Length of each of a connection's two receive windows, in bytes.
    #[arg(long, default_value_t = Config::server().window)]
    window: u32,
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
    match arguments.backend {
        Backend::Verbs => {
            let listener = Listener::bind(&Verbs::load()?, arguments.listen, options)?;
            println!("kv_server: RDMA on {}", listener.local_addr().unwrap_or(arguments.listen));
            serve(&listener, &Arc::default());
            Ok(())
        }
        Backend::Softsim => {
            let fabric = Fabric::new();
            let address = SocketAddr::from(([192, 0, 2, 1], 6379));
            let listener = Listener::bind(&fabric.host(&[address.ip()]), address, options)?;
            std::thread::spawn(move || serve(&listener, &Arc::default()));
            let client = Stream::connect(&fabric.host(&[[192, 0, 2, 2].into()]), address)?;
            Ok(demonstrate(client)?)
        }
    }
}

fn serve<B: Descriptors>(listener: &Listener<B>, store: &Arc<Store>) {
    loop {
        match listener.accept() {
            Ok((stream, peer)) => {
                let store = Arc::clone(store);
                std::thread::spawn(move || match store.serve(stream) {
                    Ok(()) => tracing::info!(%peer, "client left"),
                    Err(error) => tracing::warn!(%peer, %error, "client lost"),
                });
            }
            // Out of some resource: the peer was rejected, and the next one may fare better.
            Err(error) => tracing::warn!(%error, "cannot accept"),
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
