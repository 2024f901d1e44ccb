//! Publish and subscribe over RDMA.
//!
//! ```text
//! cargo run -p rdma-redis --example pubsub                                     # no device: on a fabric inside the process
//! cargo run -p rdma-redis --example pubsub -- valkey+rdma://192.0.2.1:6379/0   # a server
//! ```

#![allow(unreachable_pub, reason = "nothing is reachable from outside a program")]

mod softsim;

use futures_util::StreamExt;
use rdma_conn::Descriptors;
use rdma_redis::Client;
use rdma_verbs::Verbs;
use redis::AsyncCommands;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    match std::env::args().nth(1) {
        Some(url) => demonstrate(Client::open(Verbs::load()?, &url)?).await,
        None => demonstrate(Client::open(softsim::serve().await?, softsim::URL)?).await,
    }
}

async fn demonstrate<B: Descriptors>(client: Client<B>) -> Result<(), Box<dyn std::error::Error>> {
    let mut subscriber = client.get_async_pubsub().await?;
    subscriber.subscribe("news").await?;

    let mut publisher = client.get_multiplexed_async_connection().await?;
    for number in 1..=3 {
        let () = publisher.publish("news", format!("item {number}")).await?;
    }

    let mut messages = subscriber.on_message().take(3);
    while let Some(message) = messages.next().await {
        println!("{}: {}", message.get_channel_name(), message.get_payload::<String>()?);
    }
    Ok(())
}
