//! A cluster over RDMA: keys on all of its nodes, stored and read back.
//!
//! ```text
//! cargo run -p rdma-redis --features cluster --example cluster -- valkey+rdma://192.0.2.1:7001 …
//! ```

use std::sync::LazyLock;

use rdma_redis::{Endpoints, Nodes, Settings, cluster_connection};
use rdma_verbs::Verbs;
use redis::{AsyncCommands, RedisResult};

/// The number of keys, enough for many on each of a few nodes.
const KEYS: usize = 1000;

struct OverVerbs;

impl Nodes for OverVerbs {
    type Backend = Verbs;

    fn reach() -> RedisResult<(Endpoints<Verbs>, Settings)> {
        static VERBS: LazyLock<Result<Endpoints<Verbs>, rdma_verbs::Error>> =
            LazyLock::new(|| Verbs::load().map(Endpoints::from));
        let endpoints = VERBS.as_ref().map_err(std::io::Error::other)?;
        Ok((endpoints.clone(), Settings::default()))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let urls: Vec<String> = std::env::args().skip(1).collect();
    let mut cluster = cluster_connection::<OverVerbs>(urls.iter().map(String::as_str)).await?;
    for key in 0..KEYS {
        let () = cluster.set(format!("cluster:{key}"), key).await?;
    }
    for key in 0..KEYS {
        let found: usize = cluster.get(format!("cluster:{key}")).await?;
        assert_eq!(found, key, "another key's value");
    }
    println!("{KEYS} keys stored and read back");
    Ok(())
}
