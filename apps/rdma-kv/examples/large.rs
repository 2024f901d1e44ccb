//! Sets and gets large values, compares every byte, and prints the results. Fails if fewer bytes
//! than expected were received and sent without a copy.
//!
//! ```text
//! cargo run --release -p rdma-kv --example large
//! cargo run --release -p rdma-kv --example large -- --device 192.0.2.1:6379 --connections 8
//! cargo run --release -p rdma-kv --example large -- --tcp 127.0.0.1:6379
//! cargo run --release -p rdma-kv --example large -- --device 192.0.2.1:6379 --killed 'kill -9 4711'
//! ```

use std::net::{SocketAddr, TcpStream};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use kv_store::Store;
use rdma_conn::{Connect, Descriptors, Listener, Stream};
use rdma_kv::{Buffer, Client, Counts, Error, Login, Memory, Part, Striped, Transport};
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
    /// After that, values spread over so many connections in one protection domain.
    #[arg(long, default_value_t = 8)]
    connections: usize,
    /// And one value of so many bytes, in parts over those connections.
    #[arg(long, default_value_t = 64 << 20)]
    whole: usize,
    /// The length of a registration of that value's memory, in bytes.
    #[arg(long, default_value_t = 24 << 20)]
    slice: usize,
    /// The password of the server, or of `--user`.
    #[arg(long)]
    password: Option<String>,
    /// A user of the server's access control list.
    #[arg(long, requires = "password")]
    user: Option<String>,
    /// The database that the keys are in.
    #[arg(long, default_value_t = 0)]
    database: u32,
    /// Instead of all that: gets a value repeatedly, runs this command meanwhile, which kills the
    /// server, and expects an error in time.
    #[arg(long)]
    killed: Option<String>,
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
    if let Some(address) = arguments.tcp {
        return all(arguments, |_first: Option<&TcpStream>| Ok(TcpStream::connect(address)?));
    }
    let mut options = rdma_kv::options();
    options.protocol.window = arguments.window;
    let how = Connect::default().options(options);
    if let Some(address) = arguments.device {
        let verbs = Verbs::load()?;
        return all(arguments, |first| in_domain(&verbs, address, &how, first));
    }
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener = Listener::bind(&fabric.host(&[address.ip()]), address)?;
    let store = Arc::new(Store::default());
    thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            let store = Arc::clone(&store);
            thread::spawn(move || store.serve(stream));
        }
    });
    let host = fabric.host(&[[192, 0, 2, 2].into()]);
    all(arguments, |first| in_domain(&host, address, &how, first))
}

fn in_domain<B: Descriptors>(
    backend: &B,
    address: SocketAddr,
    how: &Connect,
    first: Option<&Stream<B>>,
) -> Result<Stream<B>, Failure> {
    Ok(match first {
        None => Stream::connect_with(backend, address, how)?,
        Some(first) => Stream::connect_in(backend, &first.domain(), address, how)?,
    })
}

fn client<T: Transport>(stream: T, arguments: &Arguments) -> Result<Client<T>, Failure> {
    let mut client = Client::new(stream);
    client.set_timeout(Some(Duration::from_secs(60)));
    let mut login = Login::default().database(arguments.database);
    if let Some(password) = &arguments.password {
        login = match &arguments.user {
            Some(user) => login.user(user.as_str(), password.as_str()),
            None => login.password(password.as_str()),
        };
    }
    client.log_in(&login)?;
    Ok(client)
}

fn all<T: Transport + Send>(
    arguments: &Arguments,
    connect: impl Fn(Option<&T>) -> Result<T, Failure>,
) -> Result<(), Failure> {
    let first = client(connect(None)?, arguments)?;
    if let Some(command) = &arguments.killed {
        return killed(first, command);
    }
    let first = values(first, arguments)?;
    let mut clients = vec![first];
    while clients.len() < arguments.connections {
        let next = connect(clients.first().map(Client::stream))?;
        clients.push(client(next, arguments)?);
    }
    let mut client = Striped::new(clients);
    striped(&mut client, arguments)?;
    whole(&mut client, arguments)
}

fn values<T: Transport>(mut client: Client<T>, arguments: &Arguments) -> Result<Client<T>, Failure> {
    let most = arguments.sizes.iter().copied().max().unwrap_or(0).max(4 << 20);
    let mut buffer = client.buffer(most)?;
    println!("{:>12}  {:>10}  {:>10}  {:>8}  {:>8}", "bytes", "SET ms", "GET ms", "landed", "copied");
    for &len in &arguments.sizes {
        let ([set, get], counts) = value(&mut client, &mut buffer, len)?;
        let share = |bytes: u64| 100.0 * bytes as f64 / len.max(1) as f64;
        // A SET copies nothing, so all copied bytes were received.
        let (landed, copied) = (share(counts.bytes_landed), share(counts.bytes_copied));
        println!("{len:>12}  {set:>10.2}  {get:>10.2}  {landed:>7.2}%  {copied:>7.2}%");
        check(&counts, len, arguments)?;
    }
    let mut random = fastrand::Rng::with_seed(arguments.seed);
    for _ in 0..arguments.random {
        let len = random.usize(0..=4 << 20);
        let (_, counts) = value(&mut client, &mut buffer, len)?;
        check(&counts, len, arguments)?;
    }
    println!("{} values of random lengths, other commands between, every byte compared", arguments.random);
    client.del(&[b"large"])?;
    println!("{:?}", client.counts());
    Ok(client)
}

/// Checks that all bytes were lent, and that all landed but two windows at most.
fn check(counts: &Counts, len: usize, arguments: &Arguments) -> Result<(), Failure> {
    if arguments.tcp.is_some() {
        return Ok(());
    }
    let least = len.saturating_sub(2 * arguments.window as usize) as u64;
    if counts.bytes_lent != len as u64 || counts.bytes_landed < least {
        return Err(format!("of {len} bytes: {counts:?}").into());
    }
    if len as u64 >= 32 * u64::from(arguments.window) && counts.bytes_landed * 100 < len as u64 * 93 {
        return Err(format!("fewer than 93 % of {len} bytes landed: {counts:?}").into());
    }
    Ok(())
}

/// Sets a value and gets it back, comparing every byte. Returns the milliseconds of each.
fn value<T: Transport>(
    client: &mut Client<T>,
    buffer: &mut T::Buffer,
    len: usize,
) -> Result<([f64; 2], Counts), Failure> {
    let value = pattern(len, len);
    let timed = |began: Instant| began.elapsed().as_secs_f64() * 1e3;
    let before = client.counts();
    write(buffer, &value)?;
    let began = Instant::now();
    client.set_from(b"large", buffer, 0..len)?;
    let set = timed(began);
    if client.strlen(b"large")? != len as u64 || client.exists(&[b"large", b"no such key"])? != 1 {
        return Err(format!("the server has not the {len} bytes that were set").into());
    }
    write(buffer, &vec![0; len])?;
    let began = Instant::now();
    let got = client.get_into(b"large", buffer, 0..len)?;
    let get = timed(began);
    let mut back = vec![0; len];
    if got != Some(len) || !buffer.read(0, &mut back) || back != value {
        return Err(format!("{got:?} bytes came back of {len}, or other ones").into());
    }
    Ok(([set, get], client.counts() - before))
}

/// Sets and gets values of lengths around multiples of windows, with one call each.
fn striped<T: Transport + Send>(client: &mut Striped<T>, arguments: &Arguments) -> Result<(), Failure> {
    let (connections, window) = (client.connections(), arguments.window as usize);
    let lengths: Vec<usize> = (0..connections)
        .flat_map(|index| [4 << 20, index * window, index * window + 1, (index + 1) * window - 1])
        .collect();
    let total = lengths.iter().sum();
    let keys: Vec<String> = (0..lengths.len()).map(|index| format!("large:{index}")).collect();
    let mut end = 0;
    let parts: Vec<_> = keys
        .iter()
        .zip(&lengths)
        .map(|(key, len)| {
            end += len;
            Part { key: key.as_bytes(), range: end - len..end }
        })
        .collect();
    let (value, before) = (pattern(total, connections), client.counts());
    let mut buffer = client.register(Memory::from(value.clone()))?;
    let began = Instant::now();
    client.mset_from(&parts, &buffer)?.into_iter().collect::<Result<Vec<_>, _>>()?;
    let set = began.elapsed();
    write(&mut buffer, &vec![0; total])?;
    let began = Instant::now();
    let got = client.mget_into(&parts, &mut buffer)?.into_iter().collect::<Result<Vec<_>, _>>()?;
    let get = began.elapsed();
    let mut back = vec![0; total];
    if got.iter().zip(&lengths).any(|(got, len)| *got != Some(*len))
        || !buffer.read(0, &mut back)
        || back != value
    {
        return Err(format!("other bytes came back over {connections} connections").into());
    }
    let counts = client.counts() - before;
    let kept = "on one registration, every byte compared";
    println!(
        "{} values, {total} bytes, over {connections} connections, {kept}: SET {set:.1?}, GET {get:.1?}",
        keys.len()
    );
    println!("{counts:?}");
    Ok(())
}

/// Sets and gets one value over one connection and over all, in memory registered in slices.
fn whole<T: Transport + Send>(client: &mut Striped<T>, arguments: &Arguments) -> Result<(), Failure> {
    let (connections, len) = (client.connections(), arguments.whole);
    let value = pattern(len, 11);
    let mut buffer = client.register(Memory::from(value.clone()).in_slices(arguments.slice))?;
    let alone = [Part { key: b"large", range: 0..len }];
    for count in [1, connections] {
        write(&mut buffer, &value)?;
        let before = client.counts();
        let began = Instant::now();
        match count {
            1 => client.mset_from(&alone, &buffer)?.into_iter().collect::<Result<_, _>>()?,
            _ => client.set_from(b"large", &buffer, 0..len)?,
        }
        let set = began.elapsed();
        write(&mut buffer, &vec![0; len])?;
        let began = Instant::now();
        let got = match count {
            1 => client.mget_into(&alone, &mut buffer)?.pop().transpose()?.flatten(),
            _ => client.get_into(b"large", &mut buffer, 0..len)?,
        };
        let get = began.elapsed();
        let mut back = vec![0; len];
        if got != Some(len) || !buffer.read(0, &mut back) || back != value {
            return Err(format!("{got:?} bytes came back of {len} in {count} parts, or other ones").into());
        }
        println!("1 value, {len} bytes, over {count} connections: SET {set:.1?}, GET {get:.1?}");
        println!("{:?}", client.counts() - before);
    }
    Ok(())
}

/// Gets a value until the server is gone. `command` kills it in the middle of a value.
fn killed<T: Transport>(mut client: Client<T>, command: &str) -> Result<(), Failure> {
    let len = 64 << 20;
    let mut buffer = client.buffer(len)?;
    write(&mut buffer, &pattern(len, 3))?;
    client.set_from(b"large", &buffer, 0..len)?;
    let command = command.to_owned();
    let killer = thread::spawn(move || {
        // While values arrive.
        thread::sleep(Duration::from_millis(300));
        Command::new("sh").args(["-c", &command]).status()
    });
    let began = Instant::now();
    let mut values = 0;
    let error = loop {
        match client.get_into(b"large", &mut buffer, 0..len) {
            Ok(_) if began.elapsed() > Duration::from_secs(60) => {
                return Err("the server is not killed".into());
            }
            Ok(_) => values += 1,
            Err(error) => break error,
        }
    };
    if !matches!(error, Error::Io(_)) || !client.is_lost() {
        return Err(format!("another error than that of a lost connection: {error}").into());
    }
    let killed = killer.join().map_err(|_| "the killer panicked")??;
    drop(client);
    // Nothing uses the buffer once the connection has ended.
    write(&mut buffer, &[0; 100])?;
    println!("after {values} values, in {:.1?}: {error} ({killed})", began.elapsed());
    Ok(())
}

fn write(buffer: &mut impl Buffer, bytes: &[u8]) -> Result<(), Failure> {
    if buffer.write(0, bytes) { Ok(()) } else { Err("the buffer is in use".into()) }
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|index| (index ^ (index >> 8) ^ (index >> 16) ^ seed) as u8).collect()
}
