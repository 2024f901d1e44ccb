//! A trace for people: two lanes, the client's and the server's.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use rdma_proto::backend::{Completed, Completion, SendOp};
use rdma_proto::wire::Message;
use rdma_softsim::trace::{Entry, What, Work};

const LANE: usize = 62;

/// The last `most` lines of what happened, the clients' to the left and the server's to the right.
#[must_use]
pub fn render(trace: &[Entry], most: usize) -> String {
    let mut hosts = BTreeMap::new();
    let lines: Vec<(String, u32, String)> = trace
        .iter()
        .filter_map(|entry| {
            if let What::Created { host, pair, .. } = entry.what {
                hosts.insert(pair, host);
            }
            let (host, text) = describe(&entry.what, &hosts)?;
            let micros = entry.at.since_start().as_nanos() as f64 / 1000.0;
            Some((format!("{:>7} {micros:>13.3}", entry.event), host, text))
        })
        .collect();
    let mut page = format!("{:>7} {:>13}  {:<LANE$} server\n", "event", "µs", "client");
    for (moment, host, text) in lines.iter().skip(lines.len().saturating_sub(most)) {
        let _never_fails = match host {
            0 => writeln!(page, "{moment}  {:<LANE$} {text}", ""),
            _ => writeln!(page, "{moment}  {:<LANE$}", format!("{host}: {text}")),
        };
    }
    page
}

/// On which host, and in words. Receives posted and completions that wait are left out: polling shows them.
fn describe(what: &What, hosts: &BTreeMap<u32, u32>) -> Option<(u32, String)> {
    let on = |pair: &u32| hosts.get(pair).copied().unwrap_or(0);
    Some(match what {
        What::Created { host, pair, identifier } => {
            (*host, format!("queue pair {pair} for identifier {identifier}"))
        }
        What::Posted { pair, work } => (on(pair), format!("[{pair}] post {}", request(work))),
        What::Executed { to, work, .. } => (on(to), format!("[{to}] <- {}", request(work))),
        What::NotReady { from, to, injected, .. } => {
            let why = if *injected { " (fault)" } else { "" };
            (on(to), format!("[{to}] no receive for pair {from}{why}"))
        }
        What::Polled(completion) => {
            (on(&completion.queue_pair), format!("[{}] polled {}", completion.queue_pair, result(completion)))
        }
        What::Told { host, identifier, what } => (*host, format!("({identifier}) event: {what}")),
        What::Called { host, identifier, what } => (*host, format!("({identifier}) call: {what}")),
        What::Struck(injection) => (injection.host, format!("*** FAULT: {:?}", injection.fault)),
        What::Tampered { pair, id } => (on(pair), format!("[{pair}] !!! bytes of {id:#x} changed")),
        What::Busy { host, what } => (*host, format!("!!! {what} destroyed while in use")),
        What::Received { .. } | What::Completed(_) => return None,
    })
}

fn request(work: &Work) -> String {
    let Work { len, signaled, message, .. } = *work;
    let signal = if signaled { " signaled" } else { "" };
    match work.op {
        SendOp::Send | SendOp::SendImmediate(_) => match message.map(|bytes| Message::decode(&bytes)) {
            Some(Ok(Message::RegisterXferMemory(window))) => {
                format!("RegisterXferMemory({:#x}, {} bytes){signal}", window.address, window.length)
            }
            Some(Ok(message)) if len == 32 => format!("{:?}{signal}", message.opcode()),
            _ => format!("SEND of {len} bytes{signal}"),
        },
        SendOp::Write(at) => format!("WRITE {len} -> {:#x}{signal}", at.address),
        SendOp::WriteImmediate(at, immediate) => {
            format!("WRITE {len} -> {:#x} imm {}{signal}", at.address, immediate.0)
        }
        SendOp::Read(at) => format!("READ {len} <- {:#x}{signal}", at.address),
    }
}

fn result(completion: &Completion) -> String {
    let id = completion.id;
    match completion.result {
        Ok(Completed::Recv { len, .. }) => format!("receive {id}: message of {len} bytes"),
        Ok(Completed::RecvWrite { immediate }) => {
            format!("receive {id}: {} bytes in the window", immediate.0)
        }
        Ok(done) => format!("{done:?} {id:#x}"),
        Err(error) => format!("{:?} of {id:#x}", error.status),
    }
}
