//! Parses the rendered pages of a timeline, which results keep, for the report to draw.

use super::timeline::{Column, split};

/// The page of one connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// The number of the connection, its ends and their addresses.
    pub title: String,
    /// The events, in order.
    pub steps: Vec<Step>,
}

/// A line of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Milliseconds since the recording began.
    pub millis: String,
    /// The side of the event.
    pub at: Column,
    /// Whether it goes to the other side.
    pub crosses: bool,
    /// The text, without the direction.
    pub text: String,
}

impl Step {
    /// Returns whether it is a failure or a mistake.
    #[must_use]
    pub fn is_trouble(&self) -> bool {
        ["FAILED", "!!!", "..."].iter().any(|mark| self.text.starts_with(mark)) || self.text.ends_with(']')
    }
}

/// Events at one side that show an action of the other side.
const ANSWERS: [&str; 4] = ["Established", "ConnectRequest", "Disconnected", "Rejected"];
/// Calls that the other side notices.
const CALLS: [&str; 4] = ["connect", "accept", "reject", "disconnect"];

/// Parses the pages of [`render`](super::timeline::render).
#[must_use]
pub fn read(pages: &str) -> Vec<Page> {
    let mut read: Vec<Page> = Vec::new();
    let mut alone = false;
    for line in pages.lines() {
        if line.starts_with("connection ") {
            alone = line.contains("not recorded");
            read.push(Page { title: line.into(), steps: Vec::new() });
        } else if let (Some(step), Some(page)) = (step(line, alone), read.last_mut()) {
            page.steps.push(step);
        }
    }
    read
}

/// Parses a line; `None` for the heads of the columns. `alone`: only one side was recorded.
fn step(line: &str, alone: bool) -> Option<Step> {
    let (millis, column, text) = split(line)?;
    let named = |prefix: &str, names: &[&str]| {
        let name = text.strip_prefix(prefix).and_then(|rest| rest.split([',', ' ', '(', ';']).next());
        name.is_some_and(|name| names.contains(&name))
    };
    let (at, crosses, text) = if let Some(request) = text.strip_prefix("post ") {
        (column, true, request.strip_suffix(", signaled").unwrap_or(request))
    } else if let Some(request) = text.strip_suffix(", as it arrived") {
        (column, true, request)
    } else if alone && named("event: ", &ANSWERS) {
        (column.other(), true, text.strip_prefix("event: ").unwrap_or(text))
    } else if named("call: ", &CALLS) {
        (column, true, text.strip_prefix("call: ").unwrap_or(text))
    } else {
        (column, false, text)
    };
    Some(Step { millis: millis.into(), at, crosses, text: text.into() })
}

#[cfg(test)]
mod tests {
    use super::super::timeline::{Line, lanes};
    use super::*;

    fn page(head: &str, lines: &[(Column, &str)]) -> Vec<Page> {
        let lines: Vec<_> = (0..)
            .zip(lines)
            .map(|(at, (column, text))| Line {
                moment: format!("{at:>10}.5 {:>12}", "+1.0"),
                column: *column,
                text: (*text).into(),
            })
            .collect();
        read(&format!("{head}\n{}", lanes(&format!("{:>12} {:>12}", "ms", "µs"), &lines)))
    }

    /// Posted requests and an unrecorded side's arrivals cross; local calls and completions do not.
    #[test]
    fn rendered_lines_say_who_did_what() {
        let lines = [
            (Column::Client, "call: resolve_addr(192.0.2.1:6379)"),
            (Column::Client, "call: connect, retry 6, rnr_retry 7; 64 receives are posted"),
            (Column::Client, "event: Established, rnr_retry 0"),
            (Column::Client, "post WRITE 34 bytes at 0 of 4096, imm 34, signaled"),
            (Column::Server, "WRITE 5 bytes at 0 of 4096, imm 5, as it arrived"),
            (Column::Client, "FAILED 0x1: WR_FLUSH_ERR"),
        ];
        let [page] = &page("connection 1: client 192.0.2.9:1; server not recorded", &lines)[..] else {
            panic!("one page")
        };
        let told: Vec<_> =
            page.steps.iter().map(|step| (step.at, step.crosses, step.text.as_str())).collect();
        assert_eq!(
            told,
            [
                (Column::Client, false, "call: resolve_addr(192.0.2.1:6379)"),
                (Column::Client, true, "connect, retry 6, rnr_retry 7; 64 receives are posted"),
                (Column::Server, true, "Established, rnr_retry 0"),
                (Column::Client, true, "WRITE 34 bytes at 0 of 4096, imm 34"),
                (Column::Server, true, "WRITE 5 bytes at 0 of 4096, imm 5"),
                (Column::Client, false, "FAILED 0x1: WR_FLUSH_ERR"),
            ]
        );
        assert_eq!(page.steps[1].millis, "1.5");
        assert!(page.steps[5].is_trouble() && !page.steps[4].is_trouble());
    }

    #[test]
    fn an_event_crosses_only_from_a_side_that_is_not_recorded() {
        let lines = [(Column::Server, "event: ConnectRequest, retry 6, rnr_retry 7")];
        let both = page("connection 1: client a (queue pair 1); server b (queue pair 2)", &lines);
        assert!(!both[0].steps[0].crosses);
    }
}
