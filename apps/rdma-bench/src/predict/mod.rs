//! Predicts a server's performance on a card, by a closed formula.
//!
//! Each cost below has its source beside it. Two were fitted to published points and say so.
//! [`calibration`] compares the formula with all points that were found, including those two. No
//! card was measured for it.
//!
//! The parts of a request, of a server with one thread:
//!
//! ```text
//! processor = execution + instructions of the layer + kernel entries + interrupts + doorbells + copies
//! latency   = processor of both sides + two ways of the network + waking up, twice, unless somebody polls
//! rate      = the least of: what the processor serves, what the clients ask (closed loop), what the link carries
//! ```

mod calibration;

use comfy_table::{CellAlignment, ContentArrangement, Table};
use serde::Serialize;

pub use calibration::{Point, calibration, points};

type Micros = f64;

/// The machines, the card and the network between them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// Gb/s of the link.
    pub link: f64,
    /// Microseconds of both ways over cables and switches alone, for one bit, without the cards.
    pub rtt: Micros,
    /// The processor's time relative to that of the published 160 K requests a second over TCP.
    pub slowness: f64,
    /// Clients at the same time.
    pub clients: u32,
    /// Requests that a client sends together.
    pub pipeline: u32,
    /// GB/s of a copy by one core.
    pub copy: f64,
    /// Whether both sides busy-poll instead of sleeping.
    pub polls: bool,
}

impl Default for Machine {
    fn default() -> Self {
        Self { link: 100.0, rtt: 1.0, slowness: 1.0, clients: 50, pipeline: 1, copy: 10.0, polls: false }
    }
}

/// `valkey-server` between its layers: PING and small GETs. Pipelined 16 deep over TCP, where 16
/// requests share the kernel's part, a core answers 1 to 1.4 M a second (`redis-benchmark -P 16` in
/// Redis' own page on benchmarks; libtpa without the kernel: 1.14 M).
const EXECUTION: Micros = 0.75;
/// The extra time of a SET, by the TCP rates of redis#9270: 1/155 K − 1/159 K.
const SET: Micros = 0.16;
/// The kernel's part of a request over TCP: fitted, with [`EXECUTION`], to redis#9270's 159 K/s.
const KERNEL_TCP: Micros = 5.22;
/// A user instruction: 3 GHz at one a cycle.
const INSTRUCTION: Micros = 0.000_33;
/// A kernel entry and its work (epoll, reading an eventfd), with mitigations: 0.2 to 0.5 µs.
const ENTRY: Micros = 0.3;
/// A post with its doorbell: about 0.1 µs with a write-combining store (Kalia, ATC 2016).
const DOORBELL: Micros = 0.1;
/// A completion's interrupt on the server's core: fitted to the 524 K PINGs a second of redis#9270.
const INTERRUPT: Micros = 0.32;
/// From an interrupt to a thread that slept. Published figures are 3 to 15 µs.
const WAKE: Micros = 4.0;
/// One way of a message inlined in its request, of both cards and a switch: 0.83 µs for 32 B.
const ONE_WAY: Micros = 0.83;
/// The extra time for a device to fetch bytes that are not inlined.
const FETCH: Micros = 0.4;
/// Bytes that can be inlined.
const INLINE: f64 = 128.0;
/// Bytes of a packet. The device fetches, or receives, a whole one before it passes it on.
const PACKET: f64 = 4096.0;
/// GB/s of a PCIe slot of the third generation, 16 lanes.
const SLOT: f64 = 12.0;
/// The application's share of a link, with packets of 4096 bytes.
const GOODPUT: f64 = 0.97;
/// The most GB/s of one queue pair (361 to 365 Gb/s on a link of 400: pegaflow 291).
const QUEUE_PAIR: f64 = 45.5;
/// The most GB/s of one TCP connection: copies and packets of the kernel (Mooncake's TCP: 3.2).
const TCP_STREAM: f64 = 3.2;
/// The window that Valkey and libvalkey announce: a MiB, again each time it was filled and drained.
const WINDOW: f64 = 1_048_576.0;

/// An implementation and its transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    /// This project's engine in `valkey-server`, and its client.
    Ours,
    /// Unmodified Valkey 9.1.2, and libvalkey.
    Valkey,
    /// Valkey over TCP, without IO threads.
    Tcp,
}

/// One side's costs of a layer for a small request and its reply, each byte copied once.
struct Layer {
    /// User instructions: `benches/counts` and `benches/peer/counts`.
    instructions: f64,
    /// Kernel entries of one request among many, beside one interrupt. If `shared`, the requests
    /// that wait when the thread wakes share both.
    entries: f64,
    /// Kernel entries of a single request (`benches/peer/counts`).
    entries_alone: f64,
    shared: bool,
    /// Writes to the device: a request, reposted receives, arming.
    doorbells: f64,
}

impl Side {
    fn layer(self) -> Option<Layer> {
        let [instructions, entries, entries_alone, doorbells] = match self {
            Self::Ours => [974.0, 2.0, 2.0, 2.0],
            Self::Valkey => [407.0, 1.0, 4.0, 3.0],
            Self::Tcp => return None,
        };
        // In Valkey each connection has a completion channel of its own.
        let shared = self == Self::Ours;
        Some(Layer { instructions, entries, entries_alone, shared, doorbells })
    }
}

/// A request: bytes there, bytes back, and its execution time beyond a PING's.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Its name.
    pub name: &'static str,
    there: f64,
    back: f64,
    extra: Micros,
}

impl Request {
    /// A GET of a value.
    #[must_use]
    pub const fn get(size: f64) -> Self {
        Self { name: "GET", there: 32.0, back: size, extra: 0.0 }
    }

    /// A SET of a value.
    #[must_use]
    pub const fn set(size: f64) -> Self {
        Self { name: "SET", there: size + 32.0, back: 5.0, extra: SET }
    }

    fn bytes(&self) -> f64 {
        self.there + self.back
    }
}

/// A prediction.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Prediction {
    /// Requests a second of all clients.
    pub rate: f64,
    /// Microseconds of one request of one client, without other load.
    pub latency: Micros,
    /// GB/s of values on one connection that requests one after the other.
    pub gigabytes: f64,
}

impl Machine {
    /// GB/s of the link for bytes of applications.
    fn wire(&self) -> f64 {
        (self.link / 8.0 * GOODPUT).min(QUEUE_PAIR)
    }

    /// Microseconds that `bytes` take at so many GB/s.
    fn at(bytes: f64, gigabytes: f64) -> Micros {
        bytes / gigabytes / 1000.0
    }

    /// One way of a message, without the processors.
    #[must_use]
    pub fn one_way(&self, bytes: f64) -> Micros {
        let fetched = if bytes > INLINE { FETCH } else { 0.0 };
        // The published 0.83 µs include a switch and a cable, about 0.5 µs there and back.
        let far = (self.rtt - 0.5).max(0.0) / 2.0;
        ONE_WAY + far + fetched + Self::at(bytes, self.wire()) + Self::at(2.0 * bytes.min(PACKET), SLOT)
    }

    /// Microseconds of the server's processor for one request among many.
    #[must_use]
    pub fn processor(&self, side: Side, request: &Request) -> Micros {
        let execution = (EXECUTION + request.extra) * self.slowness;
        let Some(layer) = side.layer() else {
            let kernel = KERNEL_TCP * self.slowness / f64::from(self.pipeline.min(16));
            return execution + kernel + Self::at(request.bytes(), TCP_STREAM);
        };
        // At the limit each client has a request pending at each poll, which takes 16 at a time.
        let together =
            f64::from(self.pipeline) * if layer.shared { f64::from(self.clients.min(16)) } else { 1.0 };
        let asleep = (layer.entries * ENTRY + INTERRUPT) / together.max(1.0);
        let copies = Self::at(request.bytes(), self.copy);
        let work = layer.instructions * INSTRUCTION + if self.polls { 0.0 } else { asleep };
        execution + work * self.slowness + layer.doorbells * DOORBELL + copies
    }

    /// Microseconds of one request without other load.
    #[must_use]
    pub fn latency(&self, side: Side, request: &Request) -> Micros {
        let woken = if self.polls { 0.0 } else { 2.0 * WAKE };
        let alone = Self { clients: 1, pipeline: 1, ..*self };
        let Some(layer) = side.layer() else {
            let kernel = (EXECUTION + request.extra + 2.0 * KERNEL_TCP) * self.slowness;
            let copied = Self::at(request.bytes(), TCP_STREAM.min(self.wire()));
            return kernel + 2.0 * WAKE + 2.0 * ONE_WAY + copied;
        };
        // The client's, and the extra entries of the server's thread for a single request.
        let entries = if self.polls { 0.0 } else { 2.0 * layer.entries_alone - layer.entries };
        let client =
            (layer.instructions * INSTRUCTION + entries * ENTRY) * self.slowness + layer.doorbells * DOORBELL;
        let large = request.there.max(request.back);
        let (there, back) = (self.one_way(request.there.min(PACKET)), self.one_way(request.back.min(PACKET)));
        let small = Request { there: request.there.min(PACKET), back: request.back.min(PACKET), ..*request };
        let rest = (large - PACKET).max(0.0);
        alone.processor(side, &small) + client + there + back + woken + Self::at(rest, self.stream(side))
    }

    /// GB/s of one connection that carries one long value.
    #[must_use]
    pub fn stream(&self, side: Side) -> f64 {
        match side {
            Side::Tcp => TCP_STREAM.min(self.wire()),
            // Two windows: one drains while the other fills. Copies overlap with the link.
            Side::Ours => {
                let stall = 2.0 * self.one_way(INLINE);
                let filled = Self::at(WINDOW, self.wire());
                // A stall shows only if the other window fills before this one is announced.
                let drained = Self::at(WINDOW, self.copy) + stall;
                WINDOW / 1000.0 / filled.max(drained).max(Self::at(WINDOW, self.copy))
            }
            // The window fills, is drained, and is announced again. Nothing flows meanwhile.
            Side::Valkey => {
                let stall = 2.0 * self.one_way(INLINE) + if self.polls { 0.0 } else { WAKE };
                let filled = Self::at(WINDOW, self.wire().min(self.copy));
                WINDOW / 1000.0 / (filled + stall + Self::at(WINDOW, self.copy))
            }
        }
    }

    /// Returns all predictions of one request.
    #[must_use]
    pub fn predict(&self, side: Side, request: &Request) -> Prediction {
        let latency = self.latency(side, request);
        let asked = f64::from(self.clients) * f64::from(self.pipeline) / latency;
        let served = 1.0 / self.processor(side, request);
        let carried = self.link / 8.0 * GOODPUT * 1000.0 / (request.bytes() + 100.0);
        let gigabytes = request.there.max(request.back) / latency / 1000.0;
        Prediction { rate: served.min(asked).min(carried) * 1e6, latency, gigabytes }
    }

    /// Returns this machine with a processor on which Valkey answers so many PINGs a second over
    /// TCP, of `bytes` there and back.
    #[must_use]
    pub fn with_tcp_rate(self, rate: f64, bytes: f64) -> Self {
        let processor = 1e6 / rate - Self::at(2.0 * bytes, TCP_STREAM);
        Self { slowness: (processor / (EXECUTION + KERNEL_TCP)).max(0.01), ..self }
    }

    /// Returns the smallest size from which on RDMA is faster than TCP, if there is one.
    #[must_use]
    pub fn overtakes(&self) -> Option<f64> {
        let faster = |size: &f64| {
            let [ours, tcp] = [Side::Ours, Side::Tcp].map(|side| self.predict(side, &Request::get(*size)));
            ours.rate > tcp.rate && ours.latency < tcp.latency
        };
        let longest: Vec<f64> = SIZES.iter().rev().copied().take_while(faster).collect();
        longest.last().copied()
    }
}

/// Sizes of values to predict.
pub const SIZES: [f64; 6] = [64.0, 1024.0, 16_384.0, 262_144.0, 1_048_576.0, 16_777_216.0];

/// A row of the table.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// GET or SET.
    pub request: &'static str,
    /// Bytes of the value.
    pub size: f64,
    /// The side.
    pub side: Side,
    /// The prediction.
    #[serde(flatten)]
    pub prediction: Prediction,
}

/// Predicts all sizes, requests and sides on a machine.
#[must_use]
pub fn rows(machine: &Machine) -> Vec<Row> {
    let mut rows = Vec::new();
    for size in SIZES {
        for request in [Request::get(size), Request::set(size)] {
            for side in [Side::Ours, Side::Valkey, Side::Tcp] {
                let prediction = machine.predict(side, &request);
                rows.push(Row { request: request.name, size, side, prediction });
            }
        }
    }
    rows
}

/// Returns the rows as a table: the requests a second, the latency and the GB/s of each side.
#[must_use]
pub fn table(rows: &[Row]) -> Table {
    let mut table = plain();
    table.set_header([
        "request",
        "bytes",
        "requests/s: ours",
        "Valkey",
        "TCP",
        "µs alone: ours",
        "Valkey",
        "TCP",
        "GB/s: ours",
        "Valkey",
        "TCP",
    ]);
    for three in rows.chunks(3) {
        let Some(first) = three.first() else { continue };
        let each = |shown: &dyn Fn(&Prediction) -> String| {
            three.iter().map(|row| shown(&row.prediction)).collect::<Vec<_>>()
        };
        let mut cells = vec![first.request.to_owned(), format!("{}", first.size)];
        cells.extend(each(&|found| rounded(found.rate)));
        cells.extend(each(&|found| rounded(found.latency)));
        cells.extend(each(&|found| rounded(found.gigabytes)));
        table.add_row(cells);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn plain() -> Table {
    let mut table = Table::new();
    table
        .load_preset(comfy_table::presets::ASCII_MARKDOWN)
        .set_content_arrangement(ContentArrangement::Dynamic);
    table
}

/// Rounds to three digits. A prediction is no more precise.
fn rounded(number: f64) -> String {
    match number {
        _ if number >= 1e6 => format!("{:.2} M", number / 1e6),
        _ if number >= 1e4 => format!("{:.0} K", number / 1e3),
        _ if number >= 100.0 => format!("{number:.0}"),
        _ if number >= 10.0 => format!("{number:.1}"),
        _ => format!("{number:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_of_what_helps_is_never_slower() {
        let usual = Machine::default();
        for size in SIZES {
            for request in [Request::get(size), Request::set(size)] {
                for side in [Side::Ours, Side::Valkey, Side::Tcp] {
                    let before = usual.predict(side, &request);
                    assert!(before.rate > 0.0 && before.latency > 0.0);
                    for better in [
                        Machine { link: 200.0, ..usual },
                        Machine { rtt: 0.5, ..usual },
                        Machine { slowness: 0.5, ..usual },
                        Machine { copy: 20.0, ..usual },
                        Machine { polls: true, ..usual },
                    ] {
                        let after = better.predict(side, &request);
                        assert!(after.rate >= before.rate && after.latency <= before.latency, "{better:?}");
                    }
                    let longer = Request { back: request.back * 2.0, ..request };
                    assert!(usual.latency(side, &longer) >= before.latency);
                }
            }
        }
    }

    #[test]
    fn a_measured_rate_over_tcp_is_that_of_the_machine() {
        let machine = Machine::default().with_tcp_rate(400_000.0, 0.0);
        let ping = Request { name: "PING", there: 0.0, back: 0.0, extra: 0.0 };
        assert!((1.0 / machine.processor(Side::Tcp, &ping) - 0.4).abs() < 1e-9);
    }

    #[test]
    fn instructions_are_those_that_were_counted() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/counts");
        let Ok(counts) = std::fs::read_to_string(file) else {
            println!("skipped: no counts beside a packaged crate");
            return;
        };
        let served = counts.lines().find_map(|line| {
            line.strip_prefix("instructions: request of 64 B served by an Endpoint, 1 connection: ")
        });
        let served: f64 = served.expect("is counted").parse().expect("a number");
        let assumed = Side::Ours.layer().expect("RDMA").instructions;
        assert!((assumed / served - 1.0).abs() < 0.1, "{assumed} instructions are assumed, {served} counted");
    }

    #[test]
    fn tables_have_a_row_for_each_request() {
        let text = table(&rows(&Machine::default())).to_string();
        assert_eq!(text.lines().count(), 2 + 2 * SIZES.len(), "{text}");
    }
}
