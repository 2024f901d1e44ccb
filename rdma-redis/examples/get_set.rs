//! GET and SET over RDMA.
//!
//! ```text
//! cargo run -p rdma-redis --example get_set -- valkey+rdma://192.0.2.1:6379/0
//! ```

use rdma_redis::Client;
use rdma_verbs::Verbs;
use redis::AsyncCommands;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).ok_or("usage: get_set valkey+rdma://HOST:PORT/DB")?;
    let mut connection = Client::open(Verbs::load()?, &url)?.get_multiplexed_async_connection().await?;
    let () = connection.set("greeting", "hello over RDMA").await?;
    let greeting: String = connection.get("greeting").await?;
    println!("{greeting}");
    Ok(())
}
