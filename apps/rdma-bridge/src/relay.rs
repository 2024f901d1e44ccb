//! Relays bytes between one client and its server until both have ended.
//!
//! One rule governs ends. A side is ended in order when the other side has ended in order and all
//! of its bytes were delivered. A side that can only end as a whole is also ended after the other
//! has been quiet for the given time. In all other cases it is reset, so that a truncated reply
//! never looks whole.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::time::timeout;

use crate::counters::Counters;
use crate::pump::{Broken, Pump, Side, Stall, Stop, Taken};

/// How long a client that was told the end may stay silent without ending itself. Its bytes are
/// discarded: closing a socket with unread bytes resets it, and the last reply could be lost.
pub(crate) const SILENCE: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    pub(crate) stall: Duration,
    /// For more replies after a client has half-closed, if the server's connection ends as a whole.
    pub(crate) quiet: Duration,
}

/// A byte stream to one side. Dropping it before it was shut down resets the connection.
pub(crate) trait End: AsyncRead + AsyncWrite + Unpin {
    /// Returns whether its peer can end its own direction and still read, unlike over RDMA.
    fn half_closes(&self) -> bool;

    /// Returns a count that grows when its peer takes bytes, and is up to date after each poll of a
    /// write, a flush or a shutdown.
    fn taken(&self) -> Taken;
}

/// Relays until both sides have ended.
///
/// # Errors
/// Returns an error if one side broke.
pub(crate) async fn relay(
    mut client: impl End,
    mut server: impl End,
    counters: &Counters,
    patience: Patience,
) -> Result<(), Broken> {
    let Patience { stall, .. } = patience;
    let mut client = Party::new(Side::Client, &mut client, stall);
    let mut server = Party::new(Side::Server, &mut server, stall);
    let mut requests = Pump::new(Side::Client, server.stall.clone(), &counters.forward);
    let mut replies = Pump::new(Side::Server, client.stall.clone(), &counters.backward);
    let (source, stopped) = tokio::select! {
        biased;
        stopped = requests.run(&mut client.from, &mut server.to, None) => (Side::Client, stopped),
        stopped = replies.run(&mut server.from, &mut client.to, None) => (Side::Server, stopped),
    };
    let (first, gone) = match stopped {
        Ok(_) => (source, false),
        // The target takes nothing more. What it sent before counts as if its end had come first.
        Err(broken) if broken.is_gone(source.other()) => {
            let rest = match source {
                Side::Client => replies.run(&mut server.from, &mut client.to, Some(stall)).await,
                Side::Server => requests.run(&mut client.from, &mut server.to, Some(stall)).await,
            };
            match rest {
                Ok(Stop::Ended) => (source.other(), true),
                _ => return Err(broken),
            }
        }
        Err(broken) => return Err(broken),
    };
    match first {
        Side::Client => conclude(&mut client, &mut server, &mut replies, gone, patience).await,
        Side::Server => conclude(&mut server, &mut client, &mut requests, gone, patience).await,
    }
}

struct Party<'a, E> {
    side: Side,
    half_closes: bool,
    stall: Stall,
    from: ReadHalf<&'a mut E>,
    to: WriteHalf<&'a mut E>,
}

impl<'a, E: End> Party<'a, E> {
    fn new(side: Side, end: &'a mut E, stall: Duration) -> Self {
        let (half_closes, stall) = (end.half_closes(), Stall::new(stall, end.taken()));
        let (from, to) = tokio::io::split(end);
        Self { side, half_closes, stall, from, to }
    }

    /// How long it may be silent after it was told the end: pooled clients may not look for hours.
    fn silence(&self) -> Duration {
        match self.side {
            Side::Client => SILENCE.min(self.stall.limit()),
            Side::Server => self.stall.limit(),
        }
    }

    async fn finish(&mut self) -> Result<(), Broken> {
        finish(&mut self.to, &self.stall).await.map_err(self.side.broke())
    }

    /// Like `finish`, for a side that has ended before. It does not matter if it is gone.
    async fn part(&mut self) -> Result<(), Broken> {
        let _gone = self.finish().await;
        Ok(())
    }
}

/// Ends both sides, after `first` has ended in order and `second` got all of its bytes. `rest` is
/// the pump from `second` to `first`, which takes nothing from it if it is `gone`.
async fn conclude<X: End, Y: End>(
    first: &mut Party<'_, X>,
    second: &mut Party<'_, Y>,
    rest: &mut Pump<'_>,
    gone: bool,
    Patience { stall, quiet }: Patience,
) -> Result<(), Broken> {
    let takes = first.half_closes && !gone;
    if second.half_closes {
        second.finish().await?;
        if takes {
            // A client may wait for a reply for ever. A server that has ended is nearly always gone
            // as a whole, which a client that sends nothing more would never find out.
            let limit = (first.side == Side::Server).then_some(stall);
            match rest.run(&mut second.from, &mut first.to, limit).await {
                Ok(Stop::Ended) => return first.part().await,
                Ok(Stop::Quiet) => return Ok(()),
                Err(broken) if broken.is_gone(first.side) => {}
                Err(broken) => return Err(broken),
            }
        }
        let silence = second.silence();
        discard(&mut second.from, silence, stall).await;
        return Ok(());
    }
    let mut outcome = Ok(takes);
    if takes && first.side == Side::Client {
        // Ending the server's connection ends both of its directions, so wait for its replies.
        outcome = match rest.run(&mut second.from, &mut first.to, Some(quiet)).await {
            Ok(Stop::Quiet) => Ok(true),
            Ok(Stop::Ended) => return first.part().await,
            Err(broken) => unheard(broken, first.side)?,
        };
    }
    // Deliver the side's bytes, too: it may take its last ones only if it can send.
    let silence = second.silence();
    let ending = finish(&mut second.to, &second.stall);
    let ending = async { ending.await.map_err(second.side.broke()) };
    let draining = async {
        if let Ok(true) = outcome {
            match rest.run(&mut second.from, &mut first.to, None).await {
                Ok(_) => return Ok(Ok(true)),
                Err(broken) => outcome = unheard(broken, first.side)?,
            }
        }
        discard(&mut second.from, silence, stall).await;
        Ok(outcome)
    };
    let ((), heard) = tokio::try_join!(ending, draining)?;
    if heard? {
        first.part().await?;
    }
    Ok(())
}

/// Judges an error of the pump to `first`, which has ended: its bytes must still be delivered.
/// Returns whether it took the rest: not if it had ended as a whole. Too late is an error.
fn unheard(broken: Broken, first: Side) -> Result<Result<bool, Broken>, Broken> {
    match broken {
        broken if broken.is_gone(first) => Ok(Ok(false)),
        broken if broken.side == first => Ok(Err(broken)),
        broken => Err(broken),
    }
}

async fn finish(to: &mut (impl AsyncWrite + Unpin), stall: &Stall) -> io::Result<()> {
    match stall.bounds(to.shutdown()).await {
        // It had ended already.
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(()),
        result => result,
    }
}

/// Discards bytes until the end, or until none has come for `silence`, for at most `limit`.
pub(crate) async fn discard(from: &mut (impl AsyncRead + Unpin), silence: Duration, limit: Duration) {
    let mut bytes = [0; 1 << 10];
    let all = async { while let Ok(Ok(1..)) = timeout(silence, from.read(&mut bytes)).await {} };
    // A peer that continues is cut off.
    let _endless = timeout(limit, all).await;
}

#[cfg(test)]
mod tests;
