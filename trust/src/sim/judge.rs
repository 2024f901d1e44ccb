//! Judges a run: its ends while it runs, and afterwards what each connection owed its two programs.

use rdma_conn::Connection;
use rdma_softsim::{FailureClass, SoftSim};

use super::app::{AppEnd, EndCause, Ending};
use super::end::End;
use super::oracle::Violation;
use super::scenario::ScenarioConnection;
use super::world::{SERVER, World};

/// Checks that both programs got what they were promised.
///
/// # Errors
/// The promise that was broken.
fn judge(
    place: usize,
    connection: &ScenarioConnection,
    client: &Ending,
    server: &Ending,
) -> Result<(), Violation> {
    let sides =
        [("client", client, &connection.client, server), ("server", server, &connection.server, client)];
    // A program that drops its connection may lose bytes, and its peer may see an error.
    let dropped = sides.iter().any(|(_, _, workload, _)| matches!(workload.end, AppEnd::Drop { .. }));
    for (name, ending, workload, peer) in sides {
        // A server with nothing to send may leave before its window is known.
        let left_at_once = peer.written == 0 && ending.read == 0 && matches!(peer.cause, EndCause::Own);
        if let EndCause::Failed(error) = &ending.cause
            && !dropped
            && !left_at_once
        {
            let what = format!("connection {place}: the {name} failed without a cause: {error}");
            return Err(Violation::new("no cause", what));
        }
        let lost = ending.delivered && peer.read < ending.written && matches!(peer.cause, EndCause::Eof);
        // Only a program that waits for the end reads everything.
        if lost {
            let (written, read) = (ending.written, peer.read);
            let what =
                format!("closed with {written} bytes delivered, its peer read {read} and then the end");
            return Err(Violation::new("delivery", format!("connection {place}: the {name} {what}")));
        }
        let reads_first = matches!(workload.end, AppEnd::Close { reads_first: true });
        // Closing delivers what was written (VR-CLOSE-001), and the peer has not dropped it.
        if reads_first && !dropped && peer.read < workload.bytes {
            let what = format!("closed and only {} of {} bytes were delivered", peer.read, workload.bytes);
            return Err(Violation::new("delivery", format!("connection {place}: the {name} {what}")));
        }
    }
    Ok(())
}

pub(super) fn check_end(end: &End, connection: Option<&Connection<SoftSim>>) -> Result<(), Violation> {
    // Every byte once, and in order (VR-XFER-001).
    if let Some(at) = end.app().wrong_byte() {
        return Err(Violation::new("stream", format!("{}: byte {at} is not the one written", name(end))));
    }
    if let Some(connection) = connection {
        // Windows lie in an application's memory until they are full, and no longer (VR-MEM-019).
        if end.app().is_kept_from_memory(connection) {
            let what = format!("{}: memory is kept that was given up", name(end));
            return Err(Violation::new("landing", what));
        }
        let (counters, limit) = (connection.counters(), connection.options().protocol.peer_receives);
        // Never more than the peer has receives for (VR-FLOW-005).
        if counters.most_in_flight > limit.into() {
            let most = counters.most_in_flight;
            let what = format!("{}: {most} notifications in flight of {limit}", name(end));
            return Err(Violation::new("credit", what));
        }
    }
    // An end is reported to every call that waits for something else (VR-CLOSE-003).
    if let Some(Ending { cause: EndCause::Waits(call), .. }) = end.ending() {
        return Err(Violation::new("wait", format!("{}: {call} waits on, after the end", name(end))));
    }
    if let Some(Ending { cause: EndCause::Failed(error), .. }) = end.ending()
        && let rdma_conn::Error::Protocol(rdma_proto::Error::Bug(what)) = error
    {
        return Err(Violation::new("bug", format!("{}: {what}", name(end))));
    }
    Ok(())
}

fn name(end: &End) -> String {
    let side = if end.host == SERVER { "server" } else { "client" };
    format!("{side} of connection {}", end.connection)
}

impl World<'_> {
    pub(super) fn stuck(&self, cause: &str) -> Violation {
        let silent = |end: &&End| end.ending().is_none();
        let silent_ends = self.event_loops.iter().flat_map(|event_loop| {
            let silent_ends = event_loop.ends().iter().enumerate().filter(|(_, end)| silent(end));
            silent_ends.map(|(place, end)| format!("{}: {:?}", name(end), event_loop.connection(place)))
        });
        let unfinished = self.event_loops.iter().filter(|event_loop| !event_loop.is_over());
        let unfinished = unfinished.map(|event_loop| format!("{event_loop:?}"));
        let who: Vec<String> = silent_ends.chain(unfinished).collect();
        let now = self.sim.now().since_start();
        Violation::new("liveness", format!("{cause} at {now:?}: {}", who.join("; ")))
    }

    fn is_excused(&self, place: usize) -> bool {
        let concerned = |host: u32| host == SERVER || host as usize == place + 1;
        self.scenario.tight || self.struck.iter().any(|(host, ends)| *ends && concerned(*host))
    }

    pub(super) fn judge(&mut self) -> Result<(), Violation> {
        for (place, connection) in self.scenario.connections.iter().enumerate() {
            let of = |host_is_server: bool| {
                let own = move |end: &&End| end.connection == place && (end.host == SERVER) == host_is_server;
                self.all_ends().filter(own).find_map(|end| end.ending().cloned())
            };
            let (client, server) = (of(false), of(true));
            match connection.rogue {
                Some(_) => {
                    self.failure_counts.inject(FailureClass::WrongPeer);
                    self.judge_rogue(place, server)?;
                }
                None if self.is_excused(place) => {}
                None => {
                    let (Some(client), Some(server)) = (client, server) else {
                        let what = format!("connection {place} was never established");
                        return Err(Violation::new("connection", what));
                    };
                    judge(place, connection, &client, &server)?;
                }
            }
        }
        Ok(())
    }

    fn judge_rogue(&mut self, place: usize, victim: Option<Ending>) -> Result<(), Violation> {
        let Some((_, rogue)) = self.rogues.iter().find(|(of, _)| *of == place) else { return Ok(()) };
        let deviation = rogue.shown();
        if rogue.read_succeeded {
            return Err(Violation::new("rights", "a peer could read our window"));
        }
        let Some(Ending { cause, .. }) = victim else { return Ok(()) };
        let error = match &cause {
            EndCause::Failed(error) => Some(error),
            _ => None,
        };
        // A fault may have ended the connection before the rogue was noticed.
        let excused = self.is_excused(place) || !self.struck.is_empty();
        // An error that did not have to come must fit the deviation all the same.
        let must = deviation.is_fatal() && rogue.executed || error.is_some();
        if !excused && must && !deviation.is_answered_by(error) {
            let what = format!("{deviation:?} ended the connection with {cause:?}");
            return Err(Violation::new("rogue", what));
        }
        if error.is_some() {
            self.failure_counts.observe(FailureClass::WrongPeer);
        }
        Ok(())
    }
}
