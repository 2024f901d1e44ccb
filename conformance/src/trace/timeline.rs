//! A recording for people: a page for each connection, the client's lane to the left, the server's to the right.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::ends::{self, End};
use super::recording::{Entry, Params, Recording, What};
use super::words::{self, Way};

const LANE: usize = 66;

/// The end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// To the left.
    Client,
    /// To the right.
    Server,
}

impl Lane {
    const fn other(self) -> Self {
        match self {
            Self::Client => Self::Server,
            Self::Server => Self::Client,
        }
    }
}

/// A line of a page.
#[derive(Clone, Debug)]
pub struct Line {
    /// When it was, in columns as wide as the page's first.
    pub moment: String,
    /// The end that it belongs to.
    pub lane: Lane,
    /// What happened.
    pub text: String,
}

/// A page of two lanes. `moment` heads the columns of the time.
#[must_use]
pub fn lanes(moment: &str, lines: &[Line]) -> String {
    let mut page = format!("{moment}  {:<LANE$} server\n", "client");
    for Line { moment, lane, text } in lines {
        let _never_fails = match lane {
            Lane::Client => writeln!(page, "{moment}  {text}"),
            Lane::Server => writeln!(page, "{moment}  {:<LANE$} {text}", ""),
        };
    }
    page
}

/// All connections of a recording, a page for each, in the order in which they began.
#[must_use]
pub fn render(recording: &Recording) -> String {
    let ends = ends::of(recording);
    let begin = recording.entries.first().map_or(0, |entry| entry.at);
    let mut pages = Vec::new();
    for (number, end) in &ends {
        // Of two ends that are recorded, the first one tells of both.
        if end.other.is_some_and(|other| other < *number) {
            continue;
        }
        let entries = recording
            .entries
            .iter()
            .filter(|entry| entry.end == *number || Some(entry.end) == end.other || entry.end == 0);
        pages.push(page(pages.len() + 1, *number, &ends, entries, begin));
    }
    pages.join("\n")
}

fn page<'a>(
    count: usize,
    number: u32,
    ends: &BTreeMap<u32, End>,
    entries: impl Iterator<Item = &'a Entry>,
    begin: u64,
) -> String {
    let first = ends.get(&number).copied().unwrap_or_default();
    let second = first.other.and_then(|other| ends.get(&other));
    let (client, server) = if first.server { (second, Some(&first)) } else { (Some(&first), second) };
    let mut telling = Telling { client: Side::new(client.is_some()), server: Side::new(server.is_some()) };
    let mut before = begin;
    let mut lines = Vec::new();
    for entry in entries {
        let server = ends.get(&entry.end).unwrap_or(&first).server;
        let lane = if server { Lane::Server } else { Lane::Client };
        let Some((lane, text)) = telling.tell(lane, &entry.what) else { continue };
        let millis = entry.at.saturating_sub(begin) as f64 / 1e6;
        let delta = format!("+{:.1}", entry.at.saturating_sub(before) as f64 / 1e3);
        before = entry.at;
        lines.push(Line { moment: format!("{millis:>12.3} {delta:>12}"), lane, text });
    }
    let (client, server) = (name(client), name(server));
    let moment = format!("{:>12} {:>12}", "ms", "µs");
    format!("connection {count}: client {client}; server {server}\n{}", lanes(&moment, &lines))
}

fn name(end: Option<&End>) -> String {
    let Some(End { begun, pair, addresses, .. }) = end else { return "not recorded".into() };
    let address = match addresses {
        Some((local, _)) => local.to_string(),
        None if *begun => "never connected".into(),
        None => "connected before the recording began".into(),
    };
    let pair = pair.map_or_else(|| "no queue pair".into(), |pair| format!("queue pair {pair}"));
    format!("{address} ({pair})")
}

/// What has to be remembered to tell the next line.
struct Telling {
    client: Side,
    server: Side,
}

struct Side {
    recorded: bool,
    /// What it writes into.
    way: Way,
    /// Receives posted in all.
    receives: usize,
}

impl Side {
    fn new(recorded: bool) -> Self {
        Self { recorded, way: Way::default(), receives: 0 }
    }
}

impl Telling {
    /// Both sides, this one first.
    const fn sides(&mut self, lane: Lane) -> (&mut Side, &mut Side) {
        match lane {
            Lane::Client => (&mut self.client, &mut self.server),
            Lane::Server => (&mut self.server, &mut self.client),
        }
    }

    /// Who did what. Work of a peer that is not recorded itself is told in its lane, when it arrives.
    fn tell(&mut self, lane: Lane, what: &What) -> Option<(Lane, String)> {
        let (this, other) = self.sides(lane);
        let text = match what {
            What::Created => "call: create_id".into(),
            What::Requested { peer } => format!("event: ConnectRequest, {}", params(*peer)),
            What::QueuePair { number, sends, receives } => {
                format!("queue pair {number} for {sends} sends, {receives} receives")
            }
            What::Connecting { params: offered, .. } => {
                let call = if lane == Lane::Server { "accept" } else { "connect" };
                format!("call: {call}, {}; {} receives are posted", params(*offered), this.receives)
            }
            What::Called { call } => format!("call: {call}"),
            What::Event { event } => format!("event: {event}"),
            What::Posted(request) => {
                if !other.recorded {
                    other.way.announced(request);
                }
                let signaled = if request.signaled { ", signaled" } else { "" };
                format!("post {}{signaled}", this.way.request(request))
            }
            What::Receives { count } => {
                // One for each that is consumed: not worth a line.
                this.receives += count;
                return None;
            }
            What::Refused { requests, error } => format!("!!! {requests} requests were not posted: {error}"),
            What::Completed { id, outcome } => {
                let arrived = outcome.arrived(*id);
                if let Some(request) = &arrived {
                    this.way.announced(request);
                }
                match arrived {
                    Some(request) if !other.recorded => {
                        let text = format!("{}, as it arrived", other.way.request(&request));
                        return Some((lane.other(), text));
                    }
                    _ => words::outcome(*id, outcome),
                }
            }
            What::Flushed { count } => format!("{count} receives flushed"),
            What::Dropped { count } => {
                this.way.missed();
                other.way.missed();
                format!("... {count} entries are missing: the recorder was full ...")
            }
        };
        Some((lane, text))
    }
}

fn params(Params { retry_count, rnr_retry_count, .. }: Params) -> String {
    format!("retry {retry_count}, rnr_retry {rnr_retry_count}")
}
