//! A transaction over RDMA, on a reconnecting connection.
//!
//! ```text
//! cargo run -p rdma-redis --example transaction                                     # no device: on a fabric inside the process
//! cargo run -p rdma-redis --example transaction -- valkey+rdma://192.0.2.1:6379/0   # a server
//! ```

#![allow(unreachable_pub, reason = "nothing is reachable from outside a program")]

mod softsim;

use rdma_conn::Descriptors;
use rdma_redis::{Client, Reconnect};
use rdma_verbs::Verbs;
use redis::RedisResult;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    match std::env::args().nth(1) {
        Some(url) => demonstrate(Client::open(Verbs::load()?, &url)?).await?,
        None => demonstrate(Client::open(softsim::serve().await?, softsim::URL)?).await?,
    }
    Ok(())
}

async fn demonstrate<B: Descriptors>(client: Client<B>) -> RedisResult<()> {
    let mut connection = client.get_reconnecting_connection(Reconnect::default()).await?;
    // Sent as a whole, between MULTI and EXEC: a lost connection loses all of it or nothing.
    let (from, to): (String, String) = redis::pipe()
        .atomic()
        .set("from", "10")
        .ignore()
        .set("to", "32")
        .ignore()
        .get("from")
        .get("to")
        .query_async(&mut connection)
        .await?;
    println!("from {from} to {to}");
    Ok(())
}
