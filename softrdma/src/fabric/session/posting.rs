//! Requests that post work.

use std::sync::atomic::Ordering::Relaxed;

use rdma_backend::PostError;
use rdma_softsim::{Local, NamedReceive, NamedSend, Sge, Transition};
use rustix::io::Errno;
use softrdma_wire::{self as wire, Error, MAX_WORK, Name, Post, Reply};

use super::objects::{OwnedPair, OwnedReceives};
use super::{Refusal, Session, find, translate};

impl Session {
    pub(super) fn post_send(&self, pair: Name, room: u32, work: &[wire::Send<'_>]) -> Result<Reply, Refusal> {
        let owned = find(&self.pairs, pair)?;
        if room > 0 && room > owned.pair.send_room() {
            return Ok(Reply::Posted { count: 0, errno: Errno::NOMEM.raw_os_error(), room: 0 });
        }
        send(owned, work, true)
    }

    /// Performs the next of the posts that were seen.
    ///
    /// Its queue pair fails unless all of it was posted.
    pub(in super::super) fn perform_post(&mut self) -> Result<(), Error> {
        let Some(post) = self.posts.take()? else { return Ok(()) };
        self.info.requests.fetch_add(1, Relaxed);
        let (Post::Send { pair, .. } | Post::Receive { pair, .. }) = post;
        // As with a request, an unknown name changes nothing.
        let Some(owned) = self.pairs.get(&pair) else { return Ok(()) };
        let OwnedPair { pair, elements: [_, most], .. } = owned;
        let posted = match &post {
            Post::Send { work, .. } => send(owned, work, false),
            Post::Receive { work, .. } => {
                receives(work, *most, |requests| pair.post_named_receives(requests))
            }
        };
        if !matches!(posted, Ok(Reply::Posted { errno: 0, .. })) {
            // A queue pair that cannot fail is not connected: it has nothing to lose.
            let _state = pair.modify(Transition::Fail);
        }
        Ok(())
    }

    pub(super) fn post_receive(&self, pair: Name, work: &[wire::Receive]) -> Result<Reply, Refusal> {
        let OwnedPair { pair, elements: [_, most], .. } = find(&self.pairs, pair)?;
        receives(work, *most, |requests| pair.post_named_receives(requests))
    }

    pub(super) fn post_shared(&self, queue: Name, work: &[wire::Receive]) -> Result<Reply, Refusal> {
        let OwnedReceives { queue, elements, .. } = find(&self.shared, queue)?;
        receives(work, *elements, |requests| queue.post(requests))
    }
}

/// Posts sends. No fault refuses them unless they are `answered`.
fn send(owned: &OwnedPair, work: &[wire::Send<'_>], answered: bool) -> Result<Reply, Refusal> {
    let OwnedPair { pair, elements: [most, _], .. } = owned;
    if work.len() > MAX_WORK {
        return Err(Errno::INVAL.into());
    }
    let lists: Vec<Vec<Sge>> = work
        .iter()
        .map(|work| match &work.local {
            wire::Local::Inline(_) => Ok(Vec::new()),
            wire::Local::Memory(list) => named(list, *most),
        })
        .collect::<Result<_, _>>()?;
    let requests: Vec<_> = work
        .iter()
        .zip(&lists)
        .map(|(&wire::Send { id, op, signaled, solicited, ref local }, list)| {
            let local = match local {
                wire::Local::Inline(bytes) => Local::Inline(bytes),
                wire::Local::Memory(_) => Local::Memory(list),
            };
            NamedSend { id, op: translate::op(op), local, signaled, solicited }
        })
        .collect();
    let posted = if answered { pair.post_named(&requests) } else { pair.submit_named(&requests) };
    let room = if answered && posted.is_ok() { pair.send_room() } else { 0 };
    Ok(reply(requests.len(), posted, room))
}

fn receives(
    work: &[wire::Receive],
    most: u8,
    post: impl FnOnce(&[NamedReceive<'_>]) -> Result<(), PostError<rdma_softsim::Error>>,
) -> Result<Reply, Refusal> {
    if work.len() > MAX_WORK {
        return Err(Errno::INVAL.into());
    }
    let lists: Vec<Vec<Sge>> = work.iter().map(|work| named(&work.local, most)).collect::<Result<_, _>>()?;
    let requests: Vec<_> =
        work.iter().zip(&lists).map(|(work, list)| NamedReceive { id: work.id, local: list }).collect();
    Ok(reply(requests.len(), post(&requests), 0))
}

/// Returns a list of at most so many elements, as its queue has room for no more.
fn named(list: &[wire::Sge], most: u8) -> Result<Vec<Sge>, Refusal> {
    if list.len() > usize::from(most) {
        return Err(Errno::INVAL.into());
    }
    Ok(list.iter().map(|&wire::Sge { address, len, lkey }| Sge { address, len, lkey }).collect())
}

fn reply(count: usize, result: Result<(), PostError<rdma_softsim::Error>>, room: u32) -> Reply {
    let (count, errno) = match result {
        Ok(()) => (count, 0),
        Err(PostError { posted, error }) => (posted, translate::errno(&error)),
    };
    Reply::Posted { count: count as u32, errno, room }
}
