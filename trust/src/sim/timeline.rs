//! A readable trace in two lanes, the client's and the server's.

use std::collections::BTreeMap;

use rdma_backend::{Completed, Completion};
use rdma_softsim::trace::{Entry, EntryKind, Work};

use intercept::trace::recording::Request;
use intercept::trace::timeline::{Column, Line, lanes};
use intercept::trace::words;

/// Returns the last `most` lines of a trace, the clients' to the left.
#[must_use]
pub fn render(trace: &[Entry], most: usize) -> String {
    let mut hosts = BTreeMap::new();
    let lines: Vec<Line> = trace
        .iter()
        .filter_map(|entry| {
            if let EntryKind::Created { host, pair, .. } = entry.what {
                // A number may be reused: from here on it names this queue pair.
                hosts.insert(pair, host);
            }
            let (host, text) = describe(&entry.what, &hosts)?;
            let micros = entry.at.since_start().as_nanos() as f64 / 1000.0;
            let moment = format!("{:>7} {micros:>13.3}", entry.event);
            Some(match host {
                // Host 0 is the server's; see `world::SERVER`.
                0 => Line { moment, column: Column::Server, text },
                _ => Line { moment, column: Column::Client, text: format!("{host}: {text}") },
            })
        })
        .collect();
    let last = lines.get(lines.len().saturating_sub(most)..).unwrap_or_default();
    lanes(&format!("{:>7} {:>13}", "event", "µs"), last)
}

/// Returns the host of an entry and its text. What polling shows anyway is left out.
fn describe(what: &EntryKind, hosts: &BTreeMap<u32, u32>) -> Option<(u32, String)> {
    let on = |pair: &u32| hosts.get(pair).copied().unwrap_or(0);
    Some(match what {
        EntryKind::Created { host, pair, identifier } => {
            (*host, format!("queue pair {pair} for identifier {identifier}"))
        }
        EntryKind::Posted { pair, work } => (on(pair), format!("[{pair}] post {}", request(work))),
        EntryKind::Executed { to, work, .. } => (on(to), format!("[{to}] <- {}", request(work))),
        EntryKind::NotReady { from, to, injected, .. } => {
            let why = if *injected { " (fault)" } else { "" };
            (on(to), format!("[{to}] no receive for pair {from}{why}"))
        }
        EntryKind::Polled(completion) => {
            (on(&completion.queue_pair), format!("[{}] polled {}", completion.queue_pair, result(completion)))
        }
        EntryKind::Told { host, identifier, what } => (*host, format!("({identifier}) event: {what}")),
        EntryKind::Called { host, identifier, what } => (*host, format!("({identifier}) call: {what}")),
        EntryKind::Struck(injection) => (injection.host, format!("*** FAULT: {:?}", injection.fault)),
        EntryKind::Tampered { pair, id } => (on(pair), format!("[{pair}] !!! bytes of {id:#x} changed")),
        EntryKind::Busy { host, what } => (*host, format!("!!! {what} destroyed while in use")),
        EntryKind::Registered { .. } | EntryKind::Received { .. } | EntryKind::Completed(_) => return None,
    })
}

fn request(&Work { id, op, len, signaled, message }: &Work) -> String {
    let bytes = message.into_iter().flatten().take(len).collect();
    let signal = if signaled { ", signaled" } else { "" };
    format!("{}{signal}", words::request(&Request::new(id, op, len, signaled, bytes)))
}

fn result(&Completion { id, result, .. }: &Completion) -> String {
    match result {
        Ok(Completed::Recv { len, .. }) => format!("receive {id}: message of {len} bytes"),
        Ok(Completed::RecvWrite { immediate }) => {
            format!("receive {id}: {} bytes in the window", immediate.0)
        }
        Ok(done) => format!("{done:?} {id:#x}"),
        Err(error) => words::failed(id, error.status),
    }
}
