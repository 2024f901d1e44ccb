//! Many connections of one process, by each face of the library in Rust: what each costs, or which
//! limit ends them. `trust/many` runs it beside the faces in other languages.

use std::io::IoSlice;
use std::net::SocketAddr;
use std::num::NonZero;
use std::process::ExitCode;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use futures_util::future::try_join_all;
use rdma_conn::{AsyncStream, Connect, ConnectionId, Endpoint, Event, Limits, Options, Stream};
use rdma_kv::Client;
use rdma_verbs::Verbs;
use redis::aio::MultiplexedConnection;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::runtime::{Builder, Runtime};

use conformance::client::{Failure, RespClient};
use suite::terminal::cannot_run;

use crate::crowd::descriptors;

/// How long a connection may take to be established. A busy machine is not a limit.
const PATIENCE: Duration = Duration::from_secs(120);
/// How many connections an endpoint makes at a time: a listener's backlog is finite.
const BATCH: usize = 64;
const PING: &[u8] = b"PING\r\n";
const PONG: &[u8] = b"+PONG\r\n";

/// What holds the connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Face {
    /// A blocking `Stream` each.
    Stream,
    /// One `Endpoint` for all connections of a thread.
    Endpoint,
    /// An `Endpoint` each.
    Endpoints,
    /// An `AsyncStream` each, on one runtime.
    AsyncStream,
    /// A client of rdma-kv each.
    Kv,
    /// A multiplexed connection of rdma-redis each, on one runtime.
    Redis,
}

/// The command's arguments.
#[derive(Args)]
pub struct Arguments {
    /// The server, through an RDMA device.
    #[arg(long)]
    target: SocketAddr,
    /// What holds the connections.
    #[arg(long, value_enum)]
    face: Face,
    /// Connections, in addition to a first one.
    #[arg(long)]
    connections: NonZero<usize>,
    /// Threads that make and use them, each a share.
    #[arg(long, default_value = "1")]
    threads: NonZero<usize>,
}

/// The exit status if a limit ended the connections. What it was is printed.
const LIMITED: u8 = 3;

/// Runs the command.
pub fn run(arguments: &Arguments) -> ExitCode {
    let verbs = match Verbs::load() {
        Ok(verbs) => verbs,
        Err(error) => return cannot_run(&error.to_string()),
    };
    match by_face(arguments, &verbs) {
        Ok(Cost { descriptors, time }) => {
            println!("{descriptors:.2} descriptors and {:.2} ms each", time.as_secs_f64() * 1000.0);
            ExitCode::SUCCESS
        }
        Err(Limited { made, why }) => {
            println!("after {made}: {why}");
            ExitCode::from(LIMITED)
        }
    }
}

/// What a connection costs.
struct Cost {
    descriptors: f64,
    time: Duration,
}

struct Limited {
    made: usize,
    why: Failure,
}

fn by_face(arguments: &Arguments, verbs: &Verbs) -> Result<Cost, Limited> {
    let Arguments { target, face, threads, .. } = *arguments;
    let connect = || Stream::connect_with(verbs, target, &Connect::default().timeout(PATIENCE));
    let each = |share: usize, made: &AtomicUsize| one_by_one(share, made, || Ok(connect()?));
    let runtime = || -> std::io::Result<Runtime> {
        match threads.get() {
            1 => Builder::new_current_thread().enable_all().build(),
            more => Builder::new_multi_thread().worker_threads(more).enable_all().build(),
        }
    };
    match face {
        Face::Stream => measure(
            arguments,
            |share, made| Ok(each(share, made)?.into_iter().map(RespClient::new).collect()),
            |streams: &mut Vec<RespClient<_>>| {
                for stream in &mut *streams {
                    stream.send(&[b"PING"])?;
                }
                streams.iter_mut().try_for_each(|stream| stream.expect("PONG"))
            },
        ),
        Face::Kv => measure(
            arguments,
            |share, made| Ok(each(share, made)?.into_iter().map(Client::new).collect()),
            |clients: &mut Vec<Client<_>>| {
                clients.iter_mut().try_for_each(|client| match client.exists(&[b"no such key"]) {
                    Ok(0) => Ok(()),
                    Ok(_) => Err(Failure::wrong("the key exists")),
                    Err(error) => Err(Failure::wrong(error.to_string())),
                })
            },
        ),
        Face::Endpoint => measure(
            arguments,
            |share, made| Ok(vec![Members::gather(verbs, target, share, made)?]),
            |all: &mut Vec<_>| ping_all(all),
        ),
        Face::Endpoints => measure(
            arguments,
            |share, made| one_by_one(share, made, || Members::gather(verbs, target, 1, &AtomicUsize::new(0))),
            |all: &mut Vec<_>| ping_all(all),
        ),
        Face::AsyncStream => {
            let runtime = runtime().map_err(|error| Limited { made: 0, why: error.into() })?;
            measure(
                arguments,
                |share, made| {
                    let how = Connect::default().timeout(PATIENCE);
                    let connect = || AsyncStream::connect_with(verbs, target, &how);
                    one_by_one(share, made, || Ok(runtime.block_on(connect())?))
                },
                |streams: &mut Vec<AsyncStream<_>>| {
                    runtime.block_on(async {
                        for stream in &mut *streams {
                            stream.write_all(PING).await?;
                        }
                        for stream in streams {
                            let mut reply = [0; PONG.len()];
                            stream.read_exact(&mut reply).await?;
                            is_pong(&reply)?;
                        }
                        Ok(())
                    })
                },
            )
        }
        Face::Redis => {
            let unmade = |why| Limited { made: 0, why };
            let runtime = runtime().map_err(|error| unmade(error.into()))?;
            let url = format!("valkey+rdma://{target}?timeout={}", PATIENCE.as_secs());
            let client =
                rdma_redis::Client::open(verbs.clone(), url).map_err(|error| unmade(of_redis(&error)))?;
            measure(
                arguments,
                |share, made| {
                    let connect = || runtime.block_on(client.get_multiplexed_async_connection());
                    one_by_one(share, made, || connect().map_err(|error| of_redis(&error)))
                },
                |connections: &mut Vec<MultiplexedConnection>| {
                    let all = connections.iter_mut().map(async |connection| {
                        let reply = redis::cmd("PING").query_async::<String>(connection).await;
                        is_pong(format!("+{}\r\n", reply.map_err(|error| of_redis(&error))?).as_bytes())
                    });
                    runtime.block_on(try_join_all(all)).map(drop)
                },
            )
        }
    }
}

fn of_redis(error: &redis::RedisError) -> Failure {
    Failure::wrong(error.to_string())
}

fn is_pong(reply: &[u8]) -> Result<(), Failure> {
    if reply == PONG { Ok(()) } else { Err(Failure::wrong("the reply to PING is not PONG")) }
}

/// Makes connections until there are `share`. After an error, those that were made stay: the limit
/// is that of all threads together.
fn one_by_one<C>(
    share: usize,
    made: &AtomicUsize,
    connect: impl Fn() -> Result<C, Failure>,
) -> Result<Vec<C>, Failure> {
    let mut all = Vec::new();
    for _ in 0..share {
        match connect() {
            Ok(one) => all.push(one),
            Err(error) => {
                std::mem::forget(all);
                return Err(error);
            }
        }
        made.fetch_add(1, Ordering::Relaxed);
    }
    Ok(all)
}

/// Has each thread make its share of connections, then use all of them while the others exist.
fn measure<C>(
    arguments: &Arguments,
    make: impl Fn(usize, &AtomicUsize) -> Result<C, Failure> + Sync,
    ping: impl Fn(&mut C) -> Result<(), Failure> + Sync,
) -> Result<Cost, Limited> {
    let Arguments { connections, threads, .. } = *arguments;
    let (connections, threads) = (connections.get(), threads.get());
    let made = AtomicUsize::new(0);
    let limited = |why| Limited { made: made.load(Ordering::Relaxed), why };
    // The first connection opens what a process has once.
    let mut first = make(1, &AtomicUsize::new(0)).map_err(limited)?;
    ping(&mut first).map_err(limited)?;
    let before = descriptors().map_err(limited)?;
    let begun = Instant::now();
    // All have made their connections; all were counted.
    let (done, counted) = (Barrier::new(threads + 1), Barrier::new(threads + 1));
    std::thread::scope(|scope| {
        let work = |share| {
            let all = make(share, &made);
            done.wait();
            counted.wait();
            all.and_then(|mut all| ping(&mut all))
        };
        // They differ by one at most, and their sum is the number of connections.
        let share = |thread| (thread + 1) * connections / threads - thread * connections / threads;
        let threads: Vec<_> = (0..threads).map(|thread| scope.spawn(move || work(share(thread)))).collect();
        done.wait();
        let time = begun.elapsed() / u32::try_from(connections).unwrap_or(u32::MAX);
        let descriptors = descriptors().map(|now| now.saturating_sub(before) as f64 / connections as f64);
        counted.wait();
        for thread in threads {
            match thread.join() {
                Ok(outcome) => outcome.map_err(limited)?,
                Err(_) => return Err(limited(Failure::wrong("a thread panicked"))),
            }
        }
        Ok(Cost { descriptors: descriptors.map_err(limited)?, time })
    })
}

/// An endpoint and its connections.
struct Members {
    endpoint: Endpoint<Verbs>,
    ids: Vec<ConnectionId>,
}

impl Members {
    fn gather(verbs: &Verbs, target: SocketAddr, count: usize, made: &AtomicUsize) -> Result<Self, Failure> {
        let endpoint = Endpoint::new(verbs, Limits::default().connections(count))?;
        let mut members = Self { endpoint, ids: Vec::new() };
        let mut asked = 0;
        while members.ids.len() < count {
            while asked < count && asked - members.ids.len() < BATCH {
                members.endpoint.connect(target, None, PATIENCE, Options::default())?;
                asked += 1;
            }
            // Without a limit: each connect has one.
            members.endpoint.wait(None)?;
            while let Some(event) = members.endpoint.next_event() {
                match event {
                    Event::Opened { id, .. } => {
                        members.ids.push(id);
                        made.fetch_add(1, Ordering::Relaxed);
                    }
                    Event::Ended(id) => members.ended(id)?,
                    _ => {}
                }
            }
        }
        Ok(members)
    }

    fn ended(&self, id: ConnectionId) -> Result<(), Failure> {
        self.endpoint.check(id)?;
        Err(Failure::wrong("the server has closed a connection"))
    }

    fn ping(&mut self) -> Result<(), Failure> {
        // All requests before the first reply, so that the connections are in use together.
        for id in &self.ids {
            if self.endpoint.write(*id, &[IoSlice::new(PING)])? != Some(PING.len()) {
                return Err(Failure::wrong("an idle connection has no room"));
            }
        }
        let mut replies = 0;
        while replies < self.ids.len() {
            self.endpoint.wait(None)?;
            while let Some(event) = self.endpoint.next_event() {
                match event {
                    Event::Readable(id) => {
                        let mut reply = [0; PONG.len()];
                        // It comes as a whole: it is one notification.
                        if self.endpoint.read(id, &mut reply)? == Some(reply.len()) {
                            is_pong(&reply)?;
                            replies += 1;
                        }
                    }
                    Event::Ended(id) => self.ended(id)?,
                    _ => {}
                }
            }
        }
        Ok(())
    }
}

fn ping_all(all: &mut [Members]) -> Result<(), Failure> {
    all.iter_mut().try_for_each(Members::ping)
}
