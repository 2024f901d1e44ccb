//! Sets and gets large values, compares every byte, and prints how they went.
//!
//! ```text
//! cargo run --release -p rdma-kv --example large
//! cargo run --release -p rdma-kv --example large -- --device 192.0.2.1:6379
//! cargo run --release -p rdma-kv --example large -- --tcp 127.0.0.1:6379
//! ```

use std::net::{SocketAddr, TcpStream};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use kv_store::Store;
use rdma_conn::{Connect, Listener, Options, Stream};
use rdma_kv::{Buffer, Client, Transport};
use rdma_softsim::Fabric;
use rdma_verbs::Verbs;

type Failure = Box<dyn std::error::Error>;

#[derive(Parser)]
struct Arguments {
    /// A server, through an RDMA device; without it and `--tcp`, a store on the embedded fabric.
    #[arg(long, conflicts_with = "tcp")]
    device: Option<SocketAddr>,
    /// A server over TCP, where everything is copied.
    #[arg(long)]
    tcp: Option<SocketAddr>,
    /// Values of so many bytes.
    #[arg(long, value_delimiter = ',', default_values_t = [1 << 20, 4 << 20, 32 << 20, (32 << 20) + 1, (32 << 20) - 1, 64 << 20])]
    sizes: Vec<usize>,
    /// And as many of random lengths, up to 4 MiB.
    #[arg(long, default_value_t = 100)]
    random: usize,
    /// The seed of those lengths.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The length of a receive window, in bytes.
    #[arg(long, default_value_t = 1 << 20)]
    window: u32,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), Failure> {
    let mut options = Options::client();
    options.protocol.window = arguments.window;
    let how = Connect::default().options(options);
    if let Some(address) = arguments.tcp {
        return values(Client::new(TcpStream::connect(address)?), arguments);
    }
    if let Some(address) = arguments.device {
        return values(Client::new(Stream::connect_with(&Verbs::load()?, address, &how)?), arguments);
    }
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener = Listener::bind(&fabric.host(&[address.ip()]), address, Options::server())?;
    thread::spawn(move || {
        // Ends with the client.
        let _ended = listener.accept().map(|(stream, _)| Store::default().serve(stream));
    });
    let host = fabric.host(&[[192, 0, 2, 2].into()]);
    values(Client::new(Stream::connect_with(&host, address, &how)?), arguments)
}

fn values<T: Transport>(mut client: Client<T>, arguments: &Arguments) -> Result<(), Failure> {
    client.set_timeout(Some(Duration::from_secs(60)));
    let most = arguments.sizes.iter().copied().max().unwrap_or(0).max(4 << 20);
    let mut buffer = client.buffer(most)?;
    println!("{:>12}  {:>10}  {:>10}  {:>8}  {:>8}", "bytes", "SET ms", "GET ms", "landed", "copied");
    for &len in &arguments.sizes {
        let [set, get] = value(&mut client, &mut buffer, len)?;
        let before = client.counts();
        let got = client.get_into(b"large", &mut buffer, 0..len)?;
        let (counts, share) = (client.counts(), |bytes: u64| 100.0 * bytes as f64 / len.max(1) as f64);
        let landed = share(counts.bytes_landed - before.bytes_landed);
        let copied = share(counts.bytes_copied - before.bytes_copied);
        println!("{len:>12}  {set:>10.2}  {get:>10.2}  {landed:>7.2}%  {copied:>7.2}%");
        assert_eq!(got, Some(len));
    }
    let mut random = fastrand::Rng::with_seed(arguments.seed);
    for _ in 0..arguments.random {
        value(&mut client, &mut buffer, random.usize(0..=4 << 20))?;
    }
    println!("{} values of random lengths, every byte compared", arguments.random);
    client.del(&[b"large"])?;
    println!("{:?}", client.counts());
    Ok(())
}

/// Sets a value and gets it back, comparing every byte; how many milliseconds each took.
fn value<T: Transport>(
    client: &mut Client<T>,
    buffer: &mut T::Buffer,
    len: usize,
) -> Result<[f64; 2], Failure> {
    let value: Vec<u8> = (0..len).map(|index| (index ^ (index >> 8) ^ (index >> 16) ^ len) as u8).collect();
    let timed = |began: Instant| began.elapsed().as_secs_f64() * 1e3;
    if !buffer.write(0, &value) {
        return Err("the buffer is in use".into());
    }
    let began = Instant::now();
    client.set_from(b"large", buffer, 0..len)?;
    let set = timed(began);
    if !buffer.write(0, &vec![0; len]) {
        return Err("the buffer is in use".into());
    }
    let began = Instant::now();
    let got = client.get_into(b"large", buffer, 0..len)?;
    let get = timed(began);
    let mut back = vec![0; len];
    if got != Some(len) || !buffer.read(0, &mut back) || back != value {
        return Err(format!("{got:?} bytes came back of {len}, or other ones").into());
    }
    Ok([set, get])
}
