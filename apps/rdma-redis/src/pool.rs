//! Pools of connections: a [`Client`] makes them for bb8 and deadpool.
//!
//! Most programs need none, because a multiplexed connection serves many tasks. A pool is for
//! commands that block their connection.

use rdma_conn::Descriptors;
use redis::aio::MultiplexedConnection;
use redis::{ErrorKind, RedisError, RedisResult};

use crate::client::Client;

async fn ping(connection: &mut MultiplexedConnection) -> RedisResult<()> {
    let pong: String = redis::cmd("PING").query_async(connection).await?;
    if pong == "PONG" {
        Ok(())
    } else {
        Err((ErrorKind::UnexpectedReturnType, "the reply to PING", pong).into())
    }
}

#[cfg(feature = "bb8")]
impl<B: Descriptors> bb8::ManageConnection for Client<B> {
    type Connection = MultiplexedConnection;
    type Error = RedisError;

    async fn connect(&self) -> RedisResult<MultiplexedConnection> {
        self.get_multiplexed_async_connection().await
    }

    async fn is_valid(&self, connection: &mut MultiplexedConnection) -> RedisResult<()> {
        ping(connection).await
    }

    fn has_broken(&self, _connection: &mut MultiplexedConnection) -> bool {
        // Unknown here; `is_valid` checks before the connection is used again.
        false
    }
}

#[cfg(feature = "deadpool")]
impl<B: Descriptors> deadpool::managed::Manager for Client<B> {
    type Type = MultiplexedConnection;
    type Error = RedisError;

    async fn create(&self) -> RedisResult<MultiplexedConnection> {
        self.get_multiplexed_async_connection().await
    }

    async fn recycle(
        &self,
        connection: &mut MultiplexedConnection,
        _uses: &deadpool::managed::Metrics,
    ) -> deadpool::managed::RecycleResult<RedisError> {
        Ok(ping(connection).await?)
    }
}
