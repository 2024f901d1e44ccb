//! The smallest fault plan that still breaks the rule.

use rdma_softsim::{Fault, FaultPlan, Injection, When};

use super::{Outcome, Scenario, run};

const MOST_RUNS: u32 = 500;

/// Makes the plan of a scenario smaller, as long as `breaks` returns that it still breaks the rule:
/// first by leaving faults out, then by making the rest earlier and shorter.
#[must_use]
pub fn shrink(mut scenario: Scenario, breaks: impl Fn(&Scenario) -> bool) -> Scenario {
    let mut runs = 0;
    let mut fails = |plan: &FaultPlan, scenario: &Scenario| {
        runs += 1;
        // Bounded: a run may take a while, and a plan need not be the smallest of all.
        runs <= MOST_RUNS && breaks(&Scenario { plan: plan.clone(), ..scenario.clone() })
    };
    let mut place = 0;
    while place < scenario.plan.len() {
        let mut less = scenario.plan.clone();
        less.remove(place);
        if fails(&less, &scenario) {
            scenario.plan = less;
            // A fault that was needed before may not be needed any more.
            place = 0;
        } else {
            place += 1;
        }
    }
    for place in 0..scenario.plan.len() {
        while let Some(smaller) = scenario.plan.get(place).copied().and_then(smaller) {
            let mut plan = scenario.plan.clone();
            plan[place] = smaller;
            if !fails(&plan, &scenario) {
                break;
            }
            scenario.plan = plan;
        }
    }
    scenario
}

/// Returns whether this oracle still fires.
#[must_use]
pub fn violates(scenario: &Scenario, oracle: &str) -> bool {
    attempt(scenario, false).violation.is_some_and(|found| found.oracle == oracle)
}

/// Runs a scenario; a panic is a broken rule like any other.
#[must_use]
pub fn attempt(scenario: &Scenario, keep_trace: bool) -> Outcome {
    std::panic::catch_unwind(|| run(scenario, keep_trace)).unwrap_or_else(|panic| {
        // `panic!` has a `String` if it formats, and a `&str` if not.
        let what = panic.downcast_ref::<String>().cloned();
        let what = what.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Outcome::panicked(what.unwrap_or_default())
    })
}

fn smaller(injection: Injection) -> Option<Injection> {
    let when = match injection.when {
        When::Event(0) | When::Pass(_, 0) => None,
        When::Event(event) => Some(When::Event(event / 2)),
        When::Pass(site, pass) => Some(When::Pass(site, pass / 2)),
    };
    if let Some(when) = when {
        return Some(Injection { when, ..injection });
    }
    let half = |micros: u32| (micros > 1).then_some(micros / 2);
    let fault = match injection.fault {
        Fault::LinkDown { micros } => Fault::LinkDown { micros: half(micros)? },
        Fault::Hold { micros } => Fault::Hold { micros: half(micros)? },
        Fault::SlowReady { micros } => Fault::SlowReady { micros: half(micros)? },
        Fault::Stall { micros } => Fault::Stall { micros: half(micros)? },
        Fault::NotReady { times } if times > 1 => Fault::NotReady { times: times / 2 },
        _ => return None,
    };
    Some(Injection { fault, ..injection })
}
