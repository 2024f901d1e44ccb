use comfy_table::{CellAlignment, ContentArrangement, Table};
use hdrhistogram::Histogram;
use serde::Serialize;

/// The result of a test.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// The test's name.
    pub test: String,
    /// Requests that were replied to.
    pub requests: u64,
    /// Seconds from the first request to the last reply.
    pub seconds: f64,
    /// Requests a second.
    pub rate: f64,
    /// How long requests took, in microseconds.
    pub latency: Latency,
}

/// How long requests took, in microseconds, to three digits. In an open loop the time runs from the
/// moment that a request was due, so that waiting behind a slow one counts (coordinated omission).
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Latency {
    /// The shortest.
    pub min: f64,
    /// The mean.
    pub mean: f64,
    /// Half took no longer.
    pub p50: f64,
    /// 95 % took no longer.
    pub p95: f64,
    /// 99 % took no longer.
    pub p99: f64,
    /// 99.9 % took no longer.
    pub p999: f64,
    /// 99.99 % took no longer.
    pub p9999: f64,
    /// The longest.
    pub max: f64,
}

impl Latency {
    pub(crate) fn of(nanos: &Histogram<u64>) -> Self {
        let micros = |nanos: u64| nanos as f64 / 1e3;
        let at = |quantile| micros(nanos.value_at_quantile(quantile));
        Self {
            min: micros(nanos.min()),
            mean: nanos.mean() / 1e3,
            p50: at(0.5),
            p95: at(0.95),
            p99: at(0.99),
            p999: at(0.999),
            p9999: at(0.9999),
            max: micros(nanos.max()),
        }
    }
}

/// Returns a table for people.
pub fn table(outcomes: &[Outcome]) -> Table {
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::UTF8_FULL_CONDENSED);
    table.set_content_arrangement(ContentArrangement::Dynamic);
    table.set_header(["test", "requests/s", "p50 µs", "p95", "p99", "p99.9", "p99.99", "max"]);
    for Outcome { test, rate, latency, .. } in outcomes {
        let Latency { p50, p95, p99, p999, p9999, max, .. } = latency;
        let numbers = [p50, p95, p99, p999, p9999, max].map(|micros| format!("{micros:.1}"));
        table.add_row([test.clone(), format!("{rate:.0}")].into_iter().chain(numbers));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Lines as `valkey-benchmark --csv` prints them, with milliseconds.
pub fn csv(outcomes: &[Outcome]) -> String {
    let mut lines = String::from(
        r#""test","rps","avg_latency_ms","min_latency_ms","p50_latency_ms","p95_latency_ms","p99_latency_ms","max_latency_ms""#,
    );
    for Outcome { test, rate, latency, .. } in outcomes {
        let Latency { mean, min, p50, p95, p99, max, .. } = latency;
        let [mean, min, p50, p95, p99, max] =
            [mean, min, p50, p95, p99, max].map(|micros| format!("{:.3}", micros / 1e3));
        lines += &format!(
            "\n\"{test}\",\"{rate:.2}\",\"{mean}\",\"{min}\",\"{p50}\",\"{p95}\",\"{p99}\",\"{max}\""
        );
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn csv_is_that_of_valkey_benchmark() {
        let mut nanos = Histogram::new(3).expect("three digits");
        [1_000_u64, 2_000, 3_000].iter().for_each(|value| nanos.record(*value).expect("in range"));
        let outcome = Outcome {
            test: "SET".into(),
            requests: 3,
            seconds: 0.5,
            rate: 6.0,
            latency: Latency::of(&nanos),
        };
        let csv = csv(&[outcome]);
        let mut lines = csv.lines();
        assert_eq!(lines.next().expect("a header").split(',').count(), 8);
        assert_eq!(lines.next(), Some(r#""SET","6.00","0.002","0.001","0.002","0.003","0.003","0.003""#));
        assert_eq!(lines.next(), None);
    }
}
