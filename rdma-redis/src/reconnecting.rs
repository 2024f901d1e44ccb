//! A connection that comes back.

use std::sync::Arc;
use std::time::Duration;

use rdma_conn::Descriptors;
use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{AsyncConnectionConfig, Cmd, Pipeline, RedisError, RedisFuture, RedisResult, Value};
use tokio::sync::Mutex;

use crate::Client;

/// How a [`Reconnecting`] connection behaves.
#[derive(Clone, Debug)]
pub struct Reconnect {
    /// How often a connection is tried before a request fails for want of one.
    pub attempts: u32,
    /// The pause after the first failed attempt; it doubles with each further one, ...
    pub first_pause: Duration,
    /// ... up to this.
    pub longest_pause: Duration,
    /// How long to wait for the reply to a request; `None` waits for ever.
    pub response_timeout: Option<Duration>,
}

impl Default for Reconnect {
    fn default() -> Self {
        Self {
            attempts: 6,
            first_pause: Duration::from_millis(100),
            longest_pause: Duration::from_secs(2),
            response_timeout: None,
        }
    }
}

/// A connection that is made anew when it was lost. Clones share it.
///
/// A request whose connection is lost fails, because nobody knows whether the server carried it out; the next one finds a new
/// connection. Subscriptions and transactions do not survive.
#[derive(Clone)]
pub struct Reconnecting<B> {
    client: Client<B>,
    how: Arc<Reconnect>,
    current: Arc<Mutex<Current>>,
    db: i64,
}

struct Current {
    connection: Option<MultiplexedConnection>,
    /// Counts connections, so that of many requests that lose the same one only the first takes it away.
    generation: u64,
}

impl<B: Descriptors> Reconnecting<B> {
    pub(crate) async fn new(client: Client<B>, how: Reconnect) -> RedisResult<Self> {
        let current = Arc::new(Mutex::new(Current { connection: None, generation: 0 }));
        let this = Self { db: client.info.redis_settings().db(), client, how: Arc::new(how), current };
        this.connection().await?;
        Ok(this)
    }

    /// The connection, made first if need be.
    async fn connection(&self) -> RedisResult<(MultiplexedConnection, u64)> {
        // Held while connecting: who comes meanwhile wants the same connection.
        let mut current = self.current.lock().await;
        if let Some(connection) = &current.connection {
            return Ok((connection.clone(), current.generation));
        }
        let connection = self.connect().await?;
        current.generation += 1;
        current.connection = Some(connection.clone());
        Ok((connection, current.generation))
    }

    async fn connect(&self) -> RedisResult<MultiplexedConnection> {
        let mut pause = self.how.first_pause;
        let mut attempt = 1;
        loop {
            let config = AsyncConnectionConfig::new().set_response_timeout(self.how.response_timeout);
            match self.client.get_multiplexed_async_connection_with_config(config).await {
                Ok(connection) => return Ok(connection),
                Err(error) if attempt >= self.how.attempts => return Err(error),
                Err(error) => tracing::info!(%error, attempt, "cannot connect yet"),
            }
            tokio::time::sleep(pause).await;
            pause = pause.saturating_mul(2).min(self.how.longest_pause);
            attempt += 1;
        }
    }

    /// Gives up the connection if `error` says that it is lost.
    async fn note(&self, error: &RedisError, generation: u64) {
        if error.is_unrecoverable_error() || error.is_connection_dropped() {
            let mut current = self.current.lock().await;
            if current.generation == generation {
                current.connection = None;
            }
        }
    }
}

impl<B: Descriptors> ConnectionLike for Reconnecting<B> {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        Box::pin(async move {
            let (mut connection, generation) = self.connection().await?;
            let reply = connection.req_packed_command(cmd).await;
            if let Err(error) = &reply {
                self.note(error, generation).await;
            }
            reply
        })
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        Box::pin(async move {
            let (mut connection, generation) = self.connection().await?;
            let replies = connection.req_packed_commands(pipeline, offset, count).await;
            if let Err(error) = &replies {
                self.note(error, generation).await;
            }
            replies
        })
    }

    fn get_db(&self) -> i64 {
        self.db
    }
}

impl<B> std::fmt::Debug for Reconnecting<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reconnecting").field("how", &self.how).finish_non_exhaustive()
    }
}
