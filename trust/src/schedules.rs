//! `valkey-rdma-trust explore`.

use std::process::ExitCode;

use clap::Args;

use suite::exit::{DONE, FAILED, NOTHING};
use suite::terminal;

use explore::{DEFECTS, Scenario, SearchEnd, Violation, explore, large, line, small, with_defect};

/// Arguments of `explore`.
#[derive(Args)]
pub struct Arguments {
    /// Only the scenarios that take seconds, which `cargo test` explores too.
    #[arg(long)]
    small: bool,
    /// Instead, put mistakes into the driver, one at a time, and show the schedule that reveals
    /// each.
    #[arg(long, conflicts_with = "small")]
    defects: bool,
    /// Only scenarios whose name contains this.
    #[arg(long, default_value = "")]
    select: String,
    /// Give up on a scenario after this many million states.
    #[arg(long, default_value_t = 200)]
    limit: u64,
}

/// Explores, and prints a line for each scenario. Succeeds if all were explored completely and
/// nothing was wrong, or if every defect was found.
pub fn run(arguments: &Arguments) -> ExitCode {
    let &Arguments { small: only_small, defects, ref select, limit } = arguments;
    let scenarios: Vec<Scenario> = if defects {
        DEFECTS.into_iter().map(with_defect).collect()
    } else if only_small {
        small()
    } else {
        large()
    };
    let (mut as_expected, mut explored) = (true, 0);
    for scenario in scenarios.iter().filter(|scenario| scenario.name.contains(select.as_str())) {
        // Saturating: more states than that are as good as no limit.
        let (seen, end) = explore(scenario, limit.saturating_mul(1_000_000));
        terminal::tell(&line(scenario, &seen, &end), 4);
        if let SearchEnd::Violated(Violation { path, .. }) = &end {
            terminal::tell(&format!("    {}", path.join(", ")), 4);
        }
        explored += 1;
        as_expected &= match end {
            SearchEnd::Complete => !defects,
            SearchEnd::Violated(_) => defects,
            // What was not explored may hide a violation, or the defect.
            SearchEnd::Truncated => false,
        };
    }
    if explored == 0 {
        terminal::complain("no scenario matches", 4);
        return ExitCode::from(NOTHING);
    }
    ExitCode::from(if as_expected { DONE } else { FAILED })
}
