//! GET and SET over RDMA.
//!
//! ```text
//! cargo run -p rdma-redis --example get_set                                     # no device: on a fabric inside the process
//! cargo run -p rdma-redis --example get_set -- valkey+rdma://192.0.2.1:6379/0   # a server
//! ```

#![allow(unreachable_pub, reason = "nothing is reachable from outside a program")]

mod softsim;

use rdma_conn::Descriptors;
use rdma_redis::{Client, Settings};
use rdma_verbs::Verbs;
use redis::{AsyncCommands, RedisResult};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    match std::env::args().nth(1) {
        Some(url) => demonstrate(Client::with_fallback(Verbs::load(), &url, Settings::default())?).await?,
        None => demonstrate(Client::open(softsim::serve().await?, softsim::URL)?).await?,
    }
    Ok(())
}

async fn demonstrate<B: Descriptors>(client: Client<B>) -> RedisResult<()> {
    let mut connection = client.get_multiplexed_async_connection().await?;
    if let Some(transport) = client.transport() {
        println!("connected over {transport}");
    }
    let () = connection.set("greeting", "hello").await?;
    let greeting: String = connection.get("greeting").await?;
    println!("{greeting}");
    Ok(())
}
