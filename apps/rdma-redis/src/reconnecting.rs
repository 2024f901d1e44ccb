use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use rdma_conn::Descriptors;
use redis::aio::{AsyncPushSender, ConnectionLike, MultiplexedConnection};
use redis::{
    AsyncConnectionConfig, Cmd, ErrorKind, Pipeline, RedisError, RedisFuture, RedisResult, RetryMethod,
    ToRedisArgs, Value,
};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::client::Client;

/// Settings of a [`Reconnecting`]. [`Settings`](crate::Settings) limit each attempt and each reply.
#[derive(Clone)]
pub struct Reconnect {
    /// How long a request may wait for a connection in all, over failed attempts and the pauses
    /// between them. It then fails with the error of the last attempt. The default is 10 s.
    pub deadline: Duration,
    /// The pause after the first failed attempt: by default 100 ms. It doubles with each attempt.
    pub first_pause: Duration,
    /// The longest pause. The default is 2 s. Each pause is lengthened by a random part of itself,
    /// so that clients of a lost server do not reconnect all at once.
    pub longest_pause: Duration,
    /// Receives messages to subscribers and other push messages, with `protocol=resp3` only, such
    /// as the end of a connection ([`PushKind::Disconnection`](redis::PushKind::Disconnection)).
    pub push_sender: Option<Arc<dyn AsyncPushSender>>,
}

impl Default for Reconnect {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(10),
            first_pause: Duration::from_millis(100),
            longest_pause: Duration::from_secs(2),
            push_sender: None,
        }
    }
}

impl Reconnect {
    /// Sets the receiver of push messages: the sender of a tokio channel, or a function.
    #[must_use]
    pub fn with_push_sender(mut self, sender: impl AsyncPushSender) -> Self {
        self.push_sender = Some(Arc::new(sender));
        self
    }

    fn pauses(&self) -> impl Iterator<Item = Duration> + Send + use<> {
        ExponentialBuilder::new()
            .with_min_delay(self.first_pause)
            .with_max_delay(self.longest_pause.max(self.first_pause))
            .without_max_times()
            .with_jitter()
            .build()
    }
}

/// A connection that reconnects when it is lost. Clones share it.
///
/// # What a lost connection means
///
/// - A pending request **fails and is not repeated**: it is unknown whether the server carried it
///   out. The next request waits for a new connection.
/// - **State set by commands is lost.** `SELECT`, `AUTH`, `CLIENT SETNAME`, `CLIENT TRACKING`,
///   `READONLY` and the like apply to the connection they were sent on, and the next one starts
///   without them. Put database, user and password into the URL; each new connection gets them. A
///   program that sent `SELECT 3` writes to the database of the URL after a reconnect, without an
///   error.
/// - `WATCH` and commands queued one by one between `MULTI` and `EXEC` are lost as well. Send a
///   transaction as one atomic [pipeline](redis::Pipeline::atomic).
/// - **Subscriptions** made with [`subscribe`](Self::subscribe) and
///   [`psubscribe`](Self::psubscribe) are restored, at once and without waiting for a request.
///   Messages published in between are lost, as for any disconnected subscriber of Valkey.
///   Subscriptions by other means (`SSUBSCRIBE`, or a command written by hand) are not restored.
///
/// # While there is no connection
///
/// All requests wait for the same attempts to connect, each for at most [`Reconnect::deadline`]. If
/// the attempts fail, all waiting requests fail with the error of the last attempt, and the next
/// request starts new ones. Attempts that cannot succeed are not repeated: a wrong password, a
/// database that does not exist, a machine without RDMA.
pub struct Reconnecting<B: Descriptors> {
    shared: Arc<Shared<B>>,
}

struct Shared<B: Descriptors> {
    client: Client<B>,
    how: Reconnect,
    /// Never held while waiting.
    state: Mutex<Current>,
}

#[derive(Default)]
struct Current {
    /// The connection, or the attempts to make it. `None` after a loss or a failure.
    newest: Option<Outcome>,
    /// Counts the values of `newest`: only the first request that loses a connection removes it.
    generation: u64,
    channels: BTreeSet<Vec<u8>>,
    patterns: BTreeSet<Vec<u8>>,
}

type Outcome = watch::Receiver<Option<RedisResult<MultiplexedConnection>>>;

impl<B: Descriptors> Shared<B> {
    fn state(&self) -> MutexGuard<'_, Current> {
        // The state is valid after each change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the current or pending connection, and begins to make one if there is none.
    fn newest(self: &Arc<Self>) -> (Outcome, u64) {
        let mut state = self.state();
        if let Some(outcome) = &state.newest {
            return (outcome.clone(), state.generation);
        }
        let (tell, outcome) = watch::channel(None);
        state.generation += 1;
        state.newest = Some(outcome.clone());
        let generation = state.generation;
        drop(state);
        // A task of its own: its waiters may be cancelled.
        tokio::spawn(Arc::clone(self).make(generation, tell));
        (outcome, generation)
    }

    async fn make(
        self: Arc<Self>,
        generation: u64,
        tell: watch::Sender<Option<RedisResult<MultiplexedConnection>>>,
    ) {
        let made = self.tried().await;
        // Hold nothing from here on that would keep an unused connection.
        let (shared, longest_pause) = (Arc::downgrade(&self), self.how.longest_pause);
        match made {
            Ok((connection, driver)) => {
                drop(self);
                tell.send_replace(Some(Ok(connection)));
                drop(tell);
                let _ended = driver.await;
            }
            Err(error) => {
                // Before waiters are told, so that their next request starts anew.
                self.lost(generation);
                drop(self);
                tell.send_replace(Some(Err(error.clone())));
                if is_final(&error) {
                    return;
                }
                sleep(longest_pause).await;
            }
        }
        if let Some(shared) = Weak::upgrade(&shared)
            && shared.lost(generation)
        {
            // Subscribers make no requests; reconnect for them.
            let _made_by_a_task = shared.newest();
        }
    }

    async fn tried(&self) -> RedisResult<(MultiplexedConnection, JoinHandle<()>)> {
        let mut last = None;
        let attempts = async {
            for pause in self.how.pauses() {
                match self.attempt().await {
                    Err(error) if !is_final(&error) => {
                        tracing::info!(%error, ?pause, "cannot connect yet");
                        last = Some(error);
                    }
                    done => return Some(done),
                }
                sleep(pause).await;
            }
            None
        };
        let deadline = self.how.deadline;
        let done = timeout(deadline, attempts).await.ok().flatten();
        done.unwrap_or_else(|| Err(last.unwrap_or_else(|| too_late(deadline))))
    }

    async fn attempt(&self) -> RedisResult<(MultiplexedConnection, JoinHandle<()>)> {
        let mut config = AsyncConnectionConfig::new();
        if let Some(sender) = &self.how.push_sender {
            config = config.set_push_sender(Arc::clone(sender));
        }
        let (mut connection, driver) = self.client.multiplexed(config).await?;
        let (channels, patterns) = self.state().subscriptions();
        if !channels.is_empty() {
            connection.subscribe(channels).await?;
        }
        if !patterns.is_empty() {
            connection.psubscribe(patterns).await?;
        }
        Ok((connection, driver))
    }

    /// Removes the connection of `generation`, if the newest. Returns whether it has subscriptions.
    fn lost(&self, generation: u64) -> bool {
        let mut state = self.state();
        if state.generation != generation {
            return false;
        }
        state.newest = None;
        !state.channels.is_empty() || !state.patterns.is_empty()
    }
}

impl Current {
    fn subscriptions(&self) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
        (self.channels.iter().cloned().collect(), self.patterns.iter().cloned().collect())
    }
}

fn is_final(error: &RedisError) -> bool {
    // After a wrong password redis-rs would reconnect, which only helps with a new one.
    error.kind() == ErrorKind::AuthenticationFailed || matches!(error.retry_method(), RetryMethod::NoRetry)
}

/// Returns whether `error` means that its connection is lost. A late reply does not.
pub(crate) fn is_loss(error: &RedisError) -> bool {
    error.is_unrecoverable_error() || (error.is_io_error() && !error.is_timeout())
}

fn too_late(deadline: Duration) -> RedisError {
    io::Error::new(io::ErrorKind::TimedOut, format!("no connection within {deadline:?}")).into()
}

impl<B: Descriptors> Reconnecting<B> {
    pub(crate) async fn new(client: Client<B>, how: Reconnect) -> RedisResult<Self> {
        let this = Self { shared: Arc::new(Shared { client, how, state: Mutex::default() }) };
        this.connection().await?;
        Ok(this)
    }

    async fn connection(&self) -> RedisResult<(MultiplexedConnection, u64)> {
        let (mut outcome, generation) = self.shared.newest();
        let made = outcome.wait_for(Option::is_some).await.ok().and_then(|made| made.clone());
        // Without an outcome, the connecting task is gone, and so is the runtime.
        let made = made.unwrap_or_else(|| Err(io::Error::from(io::ErrorKind::NotConnected).into()));
        Ok((made?, generation))
    }

    fn noted<T>(&self, generation: u64, outcome: RedisResult<T>) -> RedisResult<T> {
        if outcome.as_ref().is_err_and(is_loss) && self.shared.lost(generation) {
            let _made_by_a_task = self.shared.newest();
        }
        outcome
    }

    /// Subscribes to channels, after each reconnect too. Messages go to [`Reconnect::push_sender`].
    ///
    /// # Errors
    /// Returns an error, and does not subscribe, if the connection has no `protocol=resp3`, the
    /// server refuses, or there is no connection.
    pub async fn subscribe(&mut self, channels: impl ToRedisArgs) -> RedisResult<()> {
        let channels = channels.to_redis_args();
        loop {
            let (mut connection, generation) = self.connection().await?;
            self.noted(generation, connection.subscribe(&channels).await)?;
            let mut state = self.shared.state();
            state.channels.extend(channels.iter().cloned());
            // A newer connection may have been made without these.
            if state.generation == generation {
                return Ok(());
            }
        }
    }

    /// Ends subscriptions to channels, or to all of them without arguments. They are not restored,
    /// even after an error.
    ///
    /// # Errors
    /// Returns an error if the connection has no `protocol=resp3`, the server refuses, or there is
    /// no connection.
    pub async fn unsubscribe(&mut self, channels: impl ToRedisArgs) -> RedisResult<()> {
        let channels = channels.to_redis_args();
        forget(&mut self.shared.state().channels, &channels);
        let (mut connection, generation) = self.connection().await?;
        self.noted(generation, connection.unsubscribe(&channels).await)
    }

    /// Subscribes to patterns, and again after each reconnect.
    ///
    /// # Errors
    /// The errors are those of [`Reconnecting::subscribe`].
    pub async fn psubscribe(&mut self, patterns: impl ToRedisArgs) -> RedisResult<()> {
        let patterns = patterns.to_redis_args();
        loop {
            let (mut connection, generation) = self.connection().await?;
            self.noted(generation, connection.psubscribe(&patterns).await)?;
            let mut state = self.shared.state();
            state.patterns.extend(patterns.iter().cloned());
            if state.generation == generation {
                return Ok(());
            }
        }
    }

    /// Ends subscriptions to patterns, or to all of them without arguments. They are not restored,
    /// even after an error.
    ///
    /// # Errors
    /// The errors are those of [`Reconnecting::unsubscribe`].
    pub async fn punsubscribe(&mut self, patterns: impl ToRedisArgs) -> RedisResult<()> {
        let patterns = patterns.to_redis_args();
        forget(&mut self.shared.state().patterns, &patterns);
        let (mut connection, generation) = self.connection().await?;
        self.noted(generation, connection.punsubscribe(&patterns).await)
    }
}

/// Removes `names` from `subscriptions`, or all if there are none, like UNSUBSCRIBE.
fn forget(subscriptions: &mut BTreeSet<Vec<u8>>, names: &[Vec<u8>]) {
    if names.is_empty() {
        subscriptions.clear();
    }
    subscriptions.retain(|name| !names.contains(name));
}

impl<B: Descriptors> ConnectionLike for Reconnecting<B> {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        Box::pin(async move {
            let (mut connection, generation) = self.connection().await?;
            self.noted(generation, connection.req_packed_command(cmd).await)
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
            self.noted(generation, connection.req_packed_commands(pipeline, offset, count).await)
        })
    }

    fn get_db(&self) -> i64 {
        self.shared.client.info.redis_settings().db()
    }
}

impl<B: Descriptors> Clone for Reconnecting<B> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<B: Descriptors> fmt::Debug for Reconnecting<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reconnecting").field("how", &self.shared.how).finish_non_exhaustive()
    }
}

impl fmt::Debug for Reconnect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { deadline, first_pause, longest_pause, push_sender } = self;
        f.debug_struct("Reconnect")
            .field("deadline", deadline)
            .field("first_pause", first_pause)
            .field("longest_pause", longest_pause)
            .field("push_sender", &push_sender.is_some())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_differ_between_clients() {
        let how = Reconnect::default();
        let pauses = || -> Vec<Duration> { how.pauses().take(12).collect() };
        let (mine, another) = (pauses(), pauses());
        assert_ne!(mine, another);
        let mut least = how.first_pause;
        for pause in mine {
            assert!((least..least * 2).contains(&pause), "{pause:?} instead of {least:?} and a part of it");
            least = (least * 2).min(how.longest_pause);
        }
    }

    #[test]
    fn what_cannot_succeed_is_not_tried_again() {
        let io = |kind: io::ErrorKind| RedisError::from(io::Error::from(kind));
        let refused = RedisError::from((ErrorKind::AuthenticationFailed, "wrong password"));
        let no_database = redis::parse_redis_value(b"-ERR DB index is out of range\r\n").expect("a reply");
        let loading = redis::parse_redis_value(b"-LOADING the dataset\r\n").expect("a reply");
        let [no_database, loading] =
            [no_database, loading].map(|reply| reply.extract_error().expect_err("an error"));
        for error in [refused, no_database, io(io::ErrorKind::Unsupported)] {
            assert!(is_final(&error), "{error}");
        }
        let kinds =
            [io::ErrorKind::ConnectionRefused, io::ErrorKind::TimedOut, io::ErrorKind::HostUnreachable];
        for error in kinds.map(io).into_iter().chain([loading]) {
            assert!(!is_final(&error), "{error}");
        }
    }
}
