//! Shows a recording to people: a page for each connection, the client left, the server right.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::ends::{self, ConnectionEnd};
use super::recording::{Entry, EntryKind, Params, Recording};
use super::words::{self, Direction};
use suite::terminal::fold;

const COLUMN_WIDTH: usize = 66;

/// An end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    /// On the left.
    Client,
    /// On the right.
    Server,
}

impl Column {
    /// Returns the name of the end.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Server => "server",
        }
    }

    /// Returns the other end.
    #[must_use]
    pub const fn other(self) -> Self {
        match self {
            Self::Client => Self::Server,
            Self::Server => Self::Client,
        }
    }
}

/// A line of a page.
#[derive(Clone, Debug)]
pub struct Line {
    /// Its time, in columns as wide as the page's first.
    pub moment: String,
    /// The end that it belongs to.
    pub column: Column,
    /// The text of the line.
    pub text: String,
}

/// Renders a page of two lanes. `moment` heads the columns of the time.
#[must_use]
pub fn lanes(moment: &str, lines: &[Line]) -> String {
    let mut page = format!("{moment}  {:<COLUMN_WIDTH$} server\n", "client");
    for Line { moment, column, text } in lines {
        let _never_fails = match column {
            Column::Client => writeln!(page, "{moment}  {text}"),
            Column::Server => writeln!(page, "{moment}  {:<COLUMN_WIDTH$} {text}", ""),
        };
    }
    page
}

/// Fits rendered pages to an output of `columns`. If a line would not fit, both sides are below
/// each other, without the times between lines.
#[must_use]
pub fn narrow(pages: &str, columns: usize) -> String {
    if pages.lines().all(|line| line.chars().count() <= columns) {
        return pages.into();
    }
    // The columns before the text: the time, and the longer name of a side.
    const HANGING: usize = 12 + 2 + 6 + 2;
    let mut narrow = String::new();
    for line in pages.lines() {
        let line = match split(line) {
            Some((millis, column, text)) => {
                fold(&format!("{millis:>12}  {}  {text}", column.name()), HANGING, columns)
            }
            None if line.starts_with(' ') => format!("{:>12}", "ms"),
            None => fold(line, 4, columns),
        };
        narrow += &line;
        narrow.push('\n');
    }
    narrow
}

/// Columns of a line of [`last`].
const LAST_WIDTH: usize = 72;

/// Returns the last `count` meaningful lines of pages, `client …` or `server …`, without times.
#[must_use]
pub fn last(pages: &str, count: usize) -> Vec<String> {
    // The completion of a request, or a returned receive, adds nothing to the request itself.
    let tells = |(.., text): &(&str, Column, &str)| {
        !text.starts_with("done: ") && !text.ends_with(" receives flushed")
    };
    let lines: Vec<_> = pages.lines().filter_map(split).filter(tells).collect();
    let short = |(_, column, text): &(&str, Column, &str)| {
        let line = format!("{}  {text}", column.name());
        match line.char_indices().nth(LAST_WIDTH) {
            Some((end, _)) => format!("{}…", &line[..end]),
            None => line,
        }
    };
    lines[lines.len().saturating_sub(count)..].iter().map(short).collect()
}

/// Splits a line into its milliseconds, column and text. `None` for the heads of pages.
pub(super) fn split(line: &str) -> Option<(&str, Column, &str)> {
    // Two times precede the text, each without a space.
    let (millis, rest) = line.trim_start().split_once(' ')?;
    millis.parse::<f64>().ok()?;
    let (_, rest) = rest.trim_start().split_once(' ')?;
    let text = rest.trim_start();
    let column = if rest.len() - text.len() > COLUMN_WIDTH { Column::Server } else { Column::Client };
    Some((millis, column, text))
}

/// Returns the events of the first connection of a recording, in order.
#[must_use]
pub fn first(recording: &Recording) -> Vec<Line> {
    let ends = ends::of(recording);
    let begin = recording.entries.first().map_or(0, |entry| entry.at);
    let Some((number, end)) = ends.first_key_value() else { return Vec::new() };
    lines(*number, &ends, of(recording, *number, end), begin)
}

/// Returns the events at one end and the other end of its connection, and those of all.
fn of<'a>(
    recording: &'a Recording,
    number: u32,
    end: &ConnectionEnd,
) -> impl Iterator<Item = &'a Entry> + use<'a> {
    let other = end.other;
    recording
        .entries
        .iter()
        .filter(move |entry| entry.end == number || Some(entry.end) == other || entry.end == 0)
}

/// Renders all connections of a recording, a page for each, in the order of their beginnings.
#[must_use]
pub fn render(recording: &Recording) -> String {
    let ends = ends::of(recording);
    let begin = recording.entries.first().map_or(0, |entry| entry.at);
    let mut pages = Vec::new();
    for (number, end) in &ends {
        // If two ends are recorded, the first one's page has both.
        if end.other.is_some_and(|other| other < *number) {
            continue;
        }
        let lines = lines(*number, &ends, of(recording, *number, end), begin);
        pages.push(page(pages.len() + 1, *number, &ends, &lines));
    }
    pages.join("\n")
}

fn page(count: usize, number: u32, ends: &BTreeMap<u32, ConnectionEnd>, lines: &[Line]) -> String {
    let [client, server] = sides(number, ends);
    let (client, server) = (name(client.as_ref()), name(server.as_ref()));
    let lanes = lanes(&format!("{:>12} {:>12}", "ms", "µs"), lines);
    format!("connection {count}: client {client}; server {server}\n{lanes}")
}

fn sides(number: u32, ends: &BTreeMap<u32, ConnectionEnd>) -> [Option<ConnectionEnd>; 2] {
    let first = ends.get(&number).copied().unwrap_or_default();
    let second = first.other.and_then(|other| ends.get(&other)).copied();
    if first.server { [second, Some(first)] } else { [Some(first), second] }
}

fn lines<'a>(
    number: u32,
    ends: &BTreeMap<u32, ConnectionEnd>,
    entries: impl Iterator<Item = &'a Entry>,
    begin: u64,
) -> Vec<Line> {
    let first = ends.get(&number).copied().unwrap_or_default();
    let [client, server] = sides(number, ends);
    let mut telling =
        LineContext { client: Side::new(client.is_some()), server: Side::new(server.is_some()) };
    let mut before = begin;
    let mut lines = Vec::new();
    for entry in entries {
        let server = ends.get(&entry.end).unwrap_or(&first).server;
        let column = if server { Column::Server } else { Column::Client };
        let Some((column, text)) = telling.tell(column, &entry.what) else { continue };
        let millis = entry.at.saturating_sub(begin) as f64 / 1e6;
        let delta = format!("+{:.1}", entry.at.saturating_sub(before) as f64 / 1e3);
        before = entry.at;
        lines.push(Line { moment: format!("{millis:>12.3} {delta:>12}"), column, text });
    }
    lines
}

fn name(end: Option<&ConnectionEnd>) -> String {
    let Some(ConnectionEnd { begun, pair, addresses, .. }) = end else { return "not recorded".into() };
    let address = match addresses {
        Some((local, _)) => local.to_string(),
        None if *begun => "never connected".into(),
        None => "connected before the recording began".into(),
    };
    let pair = pair.map_or_else(|| "no queue pair".into(), |pair| format!("queue pair {pair}"));
    format!("{address} ({pair})")
}

/// The state of both sides on which the text of the next line depends.
struct LineContext {
    client: Side,
    server: Side,
}

struct Side {
    recorded: bool,
    /// The window that it writes into.
    direction: Direction,
    receives: usize,
}

impl Side {
    fn new(recorded: bool) -> Self {
        Self { recorded, direction: Direction::default(), receives: 0 }
    }
}

impl LineContext {
    /// Returns both sides, this one first.
    const fn sides(&mut self, column: Column) -> (&mut Side, &mut Side) {
        match column {
            Column::Client => (&mut self.client, &mut self.server),
            Column::Server => (&mut self.server, &mut self.client),
        }
    }

    /// Returns an event's text and column. An unrecorded peer's work shows there at its arrival.
    fn tell(&mut self, column: Column, what: &EntryKind) -> Option<(Column, String)> {
        let (this, other) = self.sides(column);
        let text = match what {
            EntryKind::Created => "call: create_id".into(),
            EntryKind::Requested { peer } => format!("event: ConnectRequest, {}", params(*peer)),
            EntryKind::QueuePair { number, sends, receives } => {
                format!("queue pair {number} for {sends} sends, {receives} receives")
            }
            EntryKind::Connecting { params: offered, .. } => {
                let call = if column == Column::Server { "accept" } else { "connect" };
                format!("call: {call}, {}; {} receives are posted", params(*offered), this.receives)
            }
            EntryKind::Called { call } => format!("call: {call}"),
            EntryKind::Event { event } => format!("event: {event}"),
            EntryKind::Posted(request) => {
                if !other.recorded {
                    other.direction.announced(request);
                }
                let signaled = if request.signaled { ", signaled" } else { "" };
                format!("post {}{signaled}", this.direction.request(request))
            }
            EntryKind::Receives { count } => {
                // One for each consumed receive needs no line.
                this.receives += count;
                return None;
            }
            EntryKind::Refused { requests, error } => {
                format!("!!! {requests} requests were not posted: {error}")
            }
            EntryKind::Completed { id, outcome } => {
                let arrived = outcome.arrived(*id);
                if let Some(request) = &arrived {
                    this.direction.announced(request);
                }
                match arrived {
                    Some(request) if !other.recorded => {
                        let text = format!("{}, as it arrived", other.direction.request(&request));
                        return Some((column.other(), text));
                    }
                    _ => words::outcome(*id, outcome),
                }
            }
            EntryKind::Flushed { count } => format!("{count} receives flushed"),
            EntryKind::Dropped { count } => {
                this.direction.missed();
                other.direction.missed();
                format!("... {count} entries are missing: the recorder was full ...")
            }
        };
        Some((column, text))
    }
}

fn params(Params { retry_count, rnr_retry_count, .. }: Params) -> String {
    format!("retry {retry_count}, rnr_retry {rnr_retry_count}")
}
