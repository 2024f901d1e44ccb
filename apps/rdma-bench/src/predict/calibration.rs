//! Comparison of the formula with published measurements on cards.

use comfy_table::Table;

use super::{Machine, Request, Side, plain, rounded};

/// A published figure, and the formula's.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Point {
    /// The quantity and its unit.
    pub what: &'static str,
    /// The place of publication.
    pub source: &'static str,
    /// The published figure.
    pub published: f64,
    /// The formula's figure.
    pub predicted: f64,
    /// Whether a cost of the formula was fitted to this point. If so, it proves nothing.
    pub fitted: bool,
    /// Why the two differ, if known or guessed.
    pub note: &'static str,
}

impl Point {
    /// The predicted figure divided by the published one.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        self.predicted / self.published
    }
}

const fn ping(size: f64) -> Request {
    Request { name: "PING", there: size, back: size, extra: 0.0 }
}

/// All points.
#[must_use]
pub fn points() -> Vec<Point> {
    let mut points = Vec::new();
    let mut add = |what, source, published, predicted, fitted, note| {
        points.push(Point { what, source, published, predicted, fitted, note });
    };
    let kilo = |machine: &Machine, side, request: &Request| machine.predict(side, request).rate / 1e3;

    let connectx5 = Machine { clients: 30, ..Machine::default() };
    let source = "redis#9270, ConnectX-5, 30 clients, 512 B";
    add("PING over TCP, K/s", source, 159.0, kilo(&connectx5, Side::Tcp, &ping(512.0)), true, "");
    add("PING over RDMA, K/s", source, 524.0, kilo(&connectx5, Side::Valkey, &ping(512.0)), true, "");
    add("SET over TCP, K/s", source, 155.0, kilo(&connectx5, Side::Tcp, &Request::set(512.0)), true, "");
    add("SET over RDMA, K/s", source, 492.0, kilo(&connectx5, Side::Valkey, &Request::set(512.0)), false, "");

    let erdma = Machine::default().with_tcp_rate(377_000.0, 1024.0);
    let source = "redis#11182, eRDMA, 1 KB";
    let note = "a card of a virtual machine: its doorbells and interrupts cost more than the formula's";
    add("PING over RDMA, K/s", source, 644.0, kilo(&erdma, Side::Valkey, &ping(1024.0)), false, note);

    let libtpa = Machine { polls: true, ..Machine::default().with_tcp_rate(210_000.0, 64.0) };
    let source = "libtpa's documents: Redis without the kernel";
    let note = "TCP in user space, polled: what is left when the kernel goes; the formula has our layer in its place";
    add("GET, K/s", source, 1140.0, kilo(&libtpa, Side::Ours, &Request::get(64.0)), false, note);

    let source = "Valkey's document on RDMA: about 2 times, earlier 2.5";
    let usual = Machine::default();
    let times = kilo(&usual, Side::Valkey, &ping(64.0)) / kilo(&usual, Side::Tcp, &ping(64.0));
    add("RDMA ÷ TCP, requests", source, 2.25, times, false, "on which machine is not said");

    let source = "one way of a SEND, reliable connection (a thesis' table)";
    for (what, size, published) in [
        ("32 B, µs", 32.0, 0.83),
        ("1 KiB, µs", 1024.0, 1.6),
        ("4 KiB, µs", 4096.0, 2.3),
        ("32 KiB, µs", 32_768.0, 4.6),
    ] {
        let near = Machine { rtt: 0.5, ..usual };
        add(
            what,
            source,
            published,
            near.one_way(size),
            size < 64.0,
            "the link is not said; 100 Gb/s assumed",
        );
    }

    let ramcloud = Machine { link: 32.0, rtt: 0.5, polls: true, ..usual };
    let source = "RAMCloud, echo, InfiniBand of 32 Gb/s";
    let note = "a server whose thread hands each request to another one, which the formula has not";
    add("100 B, µs", source, 3.9, ramcloud.latency(Side::Ours, &ping(100.0)), false, note);
    add("1 MB, µs", source, 339.0, ramcloud.latency(Side::Ours, &Request::get(1e6)), false, "");

    let mooncake = Machine { link: 200.0, ..usual };
    let source = "LMCache#3018: Mooncake, 16 MiB";
    let note = "another store; a copy on each side as here";
    let size = 16_777_216.0;
    let gigabytes = |side, request: &Request| mooncake.predict(side, request).gigabytes;
    add("store over RDMA, GB/s", source, 8.09, gigabytes(Side::Ours, &Request::set(size)), false, note);
    add("load over RDMA, GB/s", source, 6.40, gigabytes(Side::Ours, &Request::get(size)), false, note);
    let note = "its store takes more per byte over TCP than its load, which the formula does not know";
    add("store over TCP, GB/s", source, 1.50, gigabytes(Side::Tcp, &Request::set(size)), false, note);
    add("load over TCP, GB/s", source, 3.18, gigabytes(Side::Tcp, &Request::get(size)), true, "");

    let source = "rust-rdma-io: 64-byte echoes, 6.8 M/s of many threads";
    let note = "another library, with tasks; the formula has no command in it here";
    let echo = Machine { polls: true, ..usual };
    let processor = echo.processor(Side::Ours, &ping(64.0)) - super::EXECUTION;
    add("processor of an echo, µs", source, 1.4, processor, false, note);
    points
}

/// Returns the points as a table, with the formula's errors.
#[must_use]
pub fn calibration(points: &[Point]) -> Table {
    let mut table = plain();
    table.set_header(["published", "what", "figure", "formula", "formula ÷ figure", "note"]);
    for point in points {
        let note = if point.fitted { "fitted" } else { point.note };
        table.add_row([
            point.source.to_owned(),
            point.what.to_owned(),
            rounded(point.published),
            rounded(point.predicted),
            format!("{:.2}", point.ratio()),
            note.to_owned(),
        ]);
    }
    for column in [2, 3, 4] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(comfy_table::CellAlignment::Right);
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Points that are off by more than a factor of two. Each has a note with the reason.
    const FAR: [&str; 2] = ["store over TCP, GB/s", "processor of an echo, µs"];

    #[test]
    fn the_formula_is_as_near_as_the_page_says() {
        let points = points();
        println!("{}", calibration(&points));
        let free: Vec<_> = points.iter().filter(|point| !point.fitted).collect();
        for point in &free {
            let within = (0.5..=2.0).contains(&point.ratio());
            assert_eq!(within, !FAR.contains(&point.what), "{point:?}");
            assert!(within || !point.note.is_empty(), "{point:?}");
        }
        let near = free.iter().filter(|point| (1.0 / 1.3..=1.3).contains(&point.ratio())).count();
        assert!(near * 2 >= free.len(), "{near} of {} points are within 30 %", free.len());
        for point in points.iter().filter(|point| point.fitted) {
            assert!((0.95..=1.05).contains(&point.ratio()), "{point:?}");
        }
    }
}
