//! Runs one program against one server twice, over RDMA and over TCP, and compares the replies.
//!
//! ```text
//! cargo run --release -p rdma-redis --example same_as_tcp -- --host 192.0.2.1 --rdma-port 6380 --tcp-port 6379
//! ```
//!
//! The program sends many commands of many kinds from several tasks on one connection. It also uses
//! publish and subscribe, a transaction, a blocking pop, a large value, and, with `--restart`, a
//! server that restarts.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::time::{Duration, Instant};

use clap::Parser;
use futures_util::StreamExt;
use rdma_redis::{Client, Reconnect, Settings};
use rdma_verbs::Verbs;
use redis::aio::{ConnectionLike, MultiplexedConnection, PubSub};
use redis::{AsyncCommands, AsyncConnectionConfig, RedisResult, Value};

#[derive(Parser)]
#[command(about = "Runs one program over RDMA and over TCP, and compares what it saw")]
struct Arguments {
    /// The server.
    #[arg(long)]
    host: String,
    /// Its port for RDMA.
    #[arg(long)]
    rdma_port: u16,
    /// Its port for TCP.
    #[arg(long)]
    tcp_port: u16,
    /// Commands in all.
    #[arg(long, default_value_t = 100_000)]
    commands: u64,
    /// Tasks that send them.
    #[arg(long, default_value_t = 8)]
    tasks: u64,
    /// Length of the large value, in MiB.
    #[arg(long, default_value_t = 64)]
    large: usize,
    /// Shell command that restarts the server without its data, and returns when it accepts
    /// connections again.
    #[arg(long)]
    restart: Option<String>,
}

enum Transport {
    Rdma(Box<Client<Verbs>>),
    Tcp(redis::Client),
}

impl Transport {
    async fn connection(&self) -> RedisResult<MultiplexedConnection> {
        match self {
            Self::Rdma(client) => client.get_multiplexed_async_connection().await,
            Self::Tcp(client) => {
                // Like over RDMA; redis-rs gives up on a large value after half a second.
                let config =
                    AsyncConnectionConfig::new().set_response_timeout(Settings::default().response_timeout);
                client.get_multiplexed_async_connection_with_config(&config).await
            }
        }
    }

    async fn pubsub(&self) -> RedisResult<PubSub> {
        match self {
            Self::Rdma(client) => client.get_async_pubsub().await,
            Self::Tcp(client) => client.get_async_pubsub().await,
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments = Arguments::parse();
    let Arguments { host, rdma_port, tcp_port, .. } = &arguments;
    let rdma = Transport::Rdma(Box::new(Client::open(
        Verbs::load()?,
        format!("valkey+rdma://{host}:{rdma_port}/0"),
    )?));
    let tcp = Transport::Tcp(redis::Client::open(format!("redis://{host}:{tcp_port}/0"))?);
    let mut seen = Vec::new();
    for (name, transport) in [("RDMA", rdma), ("TCP", tcp)] {
        let begun = Instant::now();
        let digest = program(&transport, &arguments).await?;
        println!("{name}: saw {digest:016x} in {:.1} s", begun.elapsed().as_secs_f64());
        seen.push(digest);
    }
    if seen.windows(2).any(|pair| pair[0] != pair[1]) {
        return Err("the two differ".into());
    }
    println!("the same over both");
    Ok(())
}

async fn program(transport: &Transport, arguments: &Arguments) -> Result<u64, Box<dyn std::error::Error>> {
    let mut connection = transport.connection().await?;
    let () = redis::cmd("FLUSHALL").query_async(&mut connection).await?;
    let mut digest = DefaultHasher::new();

    let tasks: Vec<_> = (0..arguments.tasks)
        .map(|task| tokio::spawn(mixed(connection.clone(), task, arguments.commands / arguments.tasks)))
        .collect();
    for task in tasks {
        task.await??.hash(&mut digest);
    }

    let mut transaction = redis::pipe();
    transaction.atomic().set("counter", 40).ignore().incr("counter", 1).incr("counter", 1);
    let counts: Vec<i64> = transaction.query_async(&mut connection).await?;
    counts.hash(&mut digest);

    publish_and_subscribe(transport, &mut connection).await?.hash(&mut digest);

    // The pop blocks its connection, so the push needs another one.
    let mut waiting = transport.connection().await?;
    let pop = tokio::spawn(async move { waiting.blpop::<_, (String, String)>("queue", 30.0).await });
    let () = connection.rpush("queue", "late").await?;
    pop.await??.hash(&mut digest);

    let large: Vec<u8> =
        (0..arguments.large << 20).map(|index| (index ^ (index >> 9) ^ (index >> 17)) as u8).collect();
    let () = connection.set("large", &large).await?;
    let found: Vec<u8> = connection.get("large").await?;
    (found == large).hash(&mut digest);
    if found != large {
        return Err("the large value came back changed".into());
    }
    if let Some(command) = &arguments.restart {
        match transport {
            Transport::Rdma(client) => {
                let connection = client.get_reconnecting_connection(Reconnect::default()).await?;
                restarted(connection, command).await?.hash(&mut digest);
            }
            Transport::Tcp(client) => {
                restarted(client.get_connection_manager().await?, command).await?.hash(&mut digest);
            }
        }
    }
    Ok(digest.finish())
}

/// Sends one task's commands, on keys of its own: its replies do not depend on other tasks.
async fn mixed(mut connection: MultiplexedConnection, task: u64, commands: u64) -> RedisResult<u64> {
    let mut digest = DefaultHasher::new();
    let mut state = task + 1;
    for _ in 0..commands {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (kind, number) = (state >> 60, state >> 33);
        let key = format!("{task}:{}", number % 100);
        let (name, suffix) = match kind {
            0..4 => ("SET", 's'),
            4..8 => ("GET", 's'),
            8..10 => ("INCRBY", 'n'),
            10..12 => ("RPUSH", 'l'),
            12 => ("LRANGE", 'l'),
            13 => ("HSET", 'h'),
            14 => ("DEL", 's'),
            _ => ("PERSIST", 's'),
        };
        let mut command = redis::cmd(name);
        command.arg(format!("{key}:{suffix}"));
        match name {
            "SET" => command.arg(vec![b'v'; (number % 3000) as usize]),
            "INCRBY" | "RPUSH" => command.arg(number % 1000),
            "LRANGE" => command.arg(-20).arg(-1),
            "HSET" => command.arg(number % 50).arg(number),
            _ => &mut command,
        };
        let reply: Value = command.query_async(&mut connection).await?;
        format!("{reply:?}").hash(&mut digest);
    }
    Ok(digest.finish())
}

async fn restarted(
    mut connection: impl ConnectionLike + Clone + Send + Sync,
    command: &str,
) -> Result<Vec<Option<String>>, Box<dyn std::error::Error>> {
    let () = connection.set("before", "the restart").await?;
    let status = tokio::process::Command::new("sh").args(["-c", command]).status().await?;
    if !status.success() {
        return Err(format!("`{command}`: {status}").into());
    }
    // Requests on the lost connection fail, as their outcome is unknown; how many, is timing.
    let deadline = Instant::now() + Duration::from_secs(60);
    let after: Option<String> = loop {
        match connection.get("before").await {
            Ok(value) => break value,
            Err(_) if Instant::now() < deadline => tokio::time::sleep(Duration::from_millis(20)).await,
            Err(error) => return Err(error.into()),
        }
    };
    let () = connection.set("after", "as before").await?;
    Ok(vec![after, connection.get("after").await?])
}

async fn publish_and_subscribe(
    transport: &Transport,
    publisher: &mut MultiplexedConnection,
) -> Result<Vec<String>, Box<dyn std::error::Error>> {
    let mut subscriber = transport.pubsub().await?;
    subscriber.subscribe("news").await?;
    for number in 0..100 {
        let receivers: i64 = publisher.publish("news", format!("item {number}")).await?;
        if receivers != 1 {
            return Err(format!("{receivers} subscribers").into());
        }
    }
    let messages = subscriber.on_message().take(100);
    let payloads: Vec<_> = messages.map(|message| message.get_payload::<String>()).collect().await;
    Ok(payloads.into_iter().collect::<Result<_, _>>()?)
}
