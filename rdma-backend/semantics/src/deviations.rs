//! Known deviations of providers from the rules: data, with reasons.

use std::net::IpAddr;
use std::path::Path;

use suite::{Report, Stop};

/// One provider's deviation from one case.
#[derive(Clone, Copy, Debug)]
pub struct Deviation {
    /// The provider, as in [`Setting::provider`](super::Setting::provider).
    pub provider: &'static str,
    /// The id of the case.
    pub case: &'static str,
    /// A part of the case's report: it must fail in this way and no other.
    pub instead: &'static str,
    /// Why it deviates, and why that does no harm above.
    pub reason: &'static str,
}

/// All known deviations. Providers: `softsim`, `rxe` (Linux 6.1 was seen).
pub const TABLE: &[Deviation] = &[
    Deviation {
        provider: "rxe",
        case: "verbs.migrate.waiting-request",
        instead: "an event did not come",
        reason: "The kernel's connection manager moves the event and leaves the identifier in it behind, so that librdmacm \
                 drops the request. Nothing above moves a listener.",
    },
    Deviation {
        provider: "rxe",
        case: "verbs.access.immediate-receive",
        instead: "the receive: (0, Err(REM_ACCESS_ERR))",
        reason: "It gives the receive the status that the requester gets. Above, either ends the connection.",
    },
    Deviation {
        provider: "rxe",
        case: "verbs.length.sender",
        instead: "the sender: (1000, Err(REM_OP_ERR))",
        reason: "It takes a receive that is too short for a malformed one. Above, either ends the connection.",
    },
    Deviation {
        provider: "rxe",
        case: "verbs.length.receiver",
        instead: "the receiver: (0, Err(LOC_QP_OP_ERR))",
        reason: "It takes a receive that is too short for a malformed one. LOC_LEN_ERR alone does not show that a message was too long.",
    },
    Deviation {
        provider: "rxe",
        case: "verbs.receive-memory.gone-receiver",
        instead: "the receiver: (1, Err(LOC_QP_OP_ERR))",
        reason: "A receive that it cannot use is a malformed one to it. A bug of ours in any case.",
    },
    Deviation {
        provider: "rxe",
        case: "verbs.fail.later-receives",
        instead: "receives posted later: no completion",
        reason: "Posting a receive does not enter the kernel, and a queue pair in error looks at its receives no more. So \
                 no program may wait for receives to be flushed.",
    },
    Deviation {
        provider: "rxe",
        case: "verbs.fail.source-gone",
        instead: "the sender: (1000, Err(LOC_QP_OP_ERR))",
        reason: "It does not tell why a source could not be read. A bug of ours in any case.",
    },
    Deviation {
        provider: "rxe",
        case: "verbs.async.access",
        instead: "an event did not come",
        reason: "Of queue pairs it tells nothing but that a send queue is drained. The peer, whose request has failed, disconnects; if \
                 it does not, an unacknowledged keepalive ends the connection (VR-KEEP-006).",
    },
    Deviation {
        provider: "rxe",
        case: "verbs.queue.overrun",
        instead: "and no error",
        reason: "It drops what does not fit and tells so by an asynchronous event only (verbs.async.overrun). Above, that ends the \
                 connection, and completion queues have room for all that can complete.",
    },
];

/// Turns expected failures of `provider` into deviations, and unexpected successes into failures.
pub fn judge(provider: &str, reports: &mut [Report]) {
    judge_by(TABLE, provider, reports);
}

fn judge_by(table: &[Deviation], provider: &str, reports: &mut [Report]) {
    for report in reports {
        let row = table.iter().find(|row| row.provider == provider && row.case == report.id);
        let Some(row) = row else { continue };
        match &report.judged {
            Ok(_) => {
                let text = format!("{provider} no longer deviates ({}): the row is stale", row.instead);
                report.judged = Err(Stop::unmet(text));
            }
            Err(stop) if stop.reason.contains(row.instead) => report.expected = Some(row.reason),
            Err(_) => {}
        }
    }
}

/// Returns the provider of `address` by its device's name (`mlx5_1`: `mlx5`), unless renamed.
pub fn provider_at(address: IpAddr) -> Option<String> {
    let ip = match address {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    let gid = ip.segments().map(|segment| format!("{segment:04x}")).join(":");
    let devices = std::fs::read_dir("/sys/class/infiniband").ok()?;
    let names = devices.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let name = names.into_iter().find(|name| has_gid(name, &gid))?;
    Some(name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '_').into())
}

fn has_gid(device: &str, gid: &str) -> bool {
    let gids = Path::new("/sys/class/infiniband").join(device).join("ports/1/gids");
    let Ok(entries) = std::fs::read_dir(gids) else { return false };
    entries
        .filter_map(|entry| std::fs::read_to_string(entry.ok()?.path()).ok())
        .any(|line| line.trim() == gid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use suite::Case;
    use suite::verdict::pass;

    const ROWS: &[Deviation] =
        &[Deviation { provider: "toy", case: "verbs.a.b", instead: "ERR_2", reason: "it is a toy" }];

    fn judged(provider: &str, outcome: Result<(), &str>) -> Report {
        let judged = outcome.map(|()| pass("")).map_err(Stop::unmet);
        let case = Case::<()>::new("verbs.a.b", "", &[], |(), _| Ok::<_, Stop>(String::new()));
        let mut reports = [Report::new(&case, judged, Duration::ZERO)];
        judge_by(ROWS, provider, &mut reports);
        let [report] = reports;
        report
    }

    #[test]
    fn what_was_to_be_expected_deviates() {
        let report = judged("toy", Err("the status: ERR_2, not ERR_1"));
        assert!(!report.is_failure() && report.expected.is_some());
        assert_eq!(report.details(), "the status: ERR_2, not ERR_1. it is a toy");
    }

    #[test]
    fn another_failure_is_a_failure() {
        assert!(judged("toy", Err("the status: ERR_3, not ERR_1")).is_failure());
        assert!(judged("other", Err("the status: ERR_2, not ERR_1")).is_failure());
    }

    #[test]
    fn a_deviation_that_is_gone_is_a_failure() {
        let report = judged("toy", Ok(()));
        assert!(report.is_failure());
        assert!(report.details().contains("stale"), "{}", report.details());
        assert!(!judged("other", Ok(())).is_failure());
    }
}
