//! A share of the simulator that every test run can afford. `valkey-rdma-trust sim` runs the rest.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use rdma_backend::SendOp;
use rdma_proto::Config;
use rdma_proto::wire::FeatureSet;
use rdma_softsim::trace::EntryKind;
use rdma_softsim::{DeviceKind, FailureClass, Fault, Injection, Site, When};
use trust::sim::deviation::Deviation;
use trust::sim::runner::{DeviceKinds, Options, search};
use trust::sim::shrink::{attempt, shrink};
use trust::sim::{Scenario, timeline};

fn seeds(seeds: std::ops::Range<u64>) -> Options {
    Options {
        seeds,
        device_kind: DeviceKinds::all(),
        jobs: None,
        shrink: false,
        twice: false,
        plan: None,
        keep_going: false,
        trace: false,
    }
}

/// No rule is broken, and no class of failure is left out: each occurs, and a program handles it.
#[test]
fn seeds_of_every_personality_break_no_rule_and_meet_every_class_of_failure() {
    let summary = search(&seeds(0..600), || {});
    assert!(summary.failures.is_empty(), "{:?}", summary.failures);
    for class in FailureClass::ALL {
        let (injected, observed) =
            (summary.failure_counts.injected(*class), summary.failure_counts.observed(*class));
        assert!(injected > 0 && observed > 0, "{class:?}: brought about {injected}, observed {observed}");
    }
    assert!(summary.windows_ahead > 1000, "{} windows registered ahead", summary.windows_ahead);
}

fn deviates(scenario: &Scenario, deviation: Deviation) -> bool {
    let mut rogues = scenario.connections.iter().filter_map(|connection| connection.rogue);
    rogues.any(|rogue| rogue.deviation == deviation)
}

/// Their victims' devices execute what they write into earlier windows.
#[test]
fn trespassers_come_back_to_windows_that_were() {
    let trespasses = |scenario: &Scenario| {
        let written = attempt(scenario, true).trace.into_iter().filter(|entry| {
            let EntryKind::Executed { work, .. } = &entry.what else { return false };
            matches!(work.op, SendOp::Write(_)) && work.len == 1
        });
        written.count()
    };
    let drawn = (0..600).map(|seed| Scenario::draw(seed, DeviceKind::Ibta));
    let trespassers =
        drawn.filter(|scenario| scenario.connections.len() == 1 && deviates(scenario, Deviation::Trespass));
    let count: usize = trespassers.map(|scenario| trespasses(&scenario)).sum();
    assert!(count > 100, "{count} bytes");
}

/// VM-001: no window is registered ahead unless both sides want it.
#[test]
fn windows_are_registered_ahead_where_both_sides_want_it() {
    let mut seen = BTreeMap::new();
    for seed in 0..600 {
        let scenario = Scenario::draw(seed, DeviceKind::Ibta);
        let [connection] = &scenario.connections[..] else { continue };
        if connection.rogue.is_some() {
            continue;
        }
        let wants = |config: &Config| config.features == FeatureSet::MULTI_BUFFER;
        let sides = (wants(&connection.options.protocol), wants(&scenario.server.protocol));
        let outcome = attempt(&scenario, false);
        assert_eq!(outcome.violation, None, "seed {seed}");
        *seen.entry(sides).or_insert(0) += outcome.windows_ahead;
    }
    let both = seen.remove(&(true, true)).unwrap_or_default();
    assert!(both > 50, "{both} windows");
    assert_eq!(seen, BTreeMap::from([((false, false), 0), ((true, false), 0), ((false, true), 0)]));
}

#[test]
fn a_seed_is_one_run() {
    let mut options = seeds(0..60);
    options.twice = true;
    let summary = search(&options, || {});
    assert!(summary.failures.is_empty(), "{:?}", summary.failures);
    let hash = |seed| attempt(&Scenario::draw(seed, DeviceKind::HostileButLegal), false).hash;
    assert_ne!(hash(1), hash(2));
}

/// Starts programs while `body` runs: between fork and exec each holds this process's descriptors.
fn beside_forks<T>(body: impl FnOnce() -> T) -> T {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let forks = scope.spawn(|| {
            let mut forks = 0_u64;
            while !over.load(Ordering::Relaxed) {
                forks += u64::from(std::process::Command::new("true").status().is_ok());
            }
            forks
        });
        // Also if `body` panics.
        let ends = Over(&over);
        let result = body();
        drop(ends);
        assert!(forks.join().expect("does not panic") > 0, "no program could be started");
        result
    })
}

struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A run follows from its seed although other threads fork: a descriptor that is closed without
/// being removed from an epoll instance would be reported as long as a child holds it.
#[test]
fn a_seed_is_one_run_beside_forks() {
    beside_forks(|| (0..5).for_each(|_| a_seed_is_one_run()));
}

/// As above, long enough to see an event that happens once in a thousand runs.
#[test]
#[ignore = "takes a quarter of an hour; .ci/nightly runs it"]
fn a_seed_is_one_run_a_thousand_times_beside_forks() {
    beside_forks(|| (0..1000).for_each(|_| a_seed_is_one_run()));
}

#[test]
fn processes_of_every_kind_are_drawn() {
    let drawn: Vec<_> = (0..600).map(|seed| Scenario::draw(seed, DeviceKind::Ibta)).collect();
    let count = |of: fn(&Scenario) -> bool| drawn.iter().filter(|scenario| of(scenario)).count();
    assert!(count(|scenario| scenario.endpoints.server.is_some()) > 100);
    assert!(count(|scenario| scenario.endpoints.clients.is_some()) > 100);
    assert!(count(|scenario| deviates(scenario, Deviation::NeverReady)) > 3);
    assert!(count(|scenario| deviates(scenario, Deviation::Trespass)) > 3);
    assert!(count(|scenario| scenario.settings.held_descriptors) > 100);
    assert!(count(|scenario| scenario.settings.unnamed_flushes) > 100);
    assert!(count(|scenario| scenario.eager && scenario.endpoints.server.is_none()) > 80);
}

/// Seeds that once found a defect. When scenarios are drawn differently, they are as any other.
#[test]
fn seeds_that_found_something_find_nothing_any_more() {
    let found = [
        // A dial armed its queue, took the event that this had raised, and slept forever.
        (836, DeviceKind::Ibta),
        // A reply and the end that followed at once: connecting failed and the reply was lost.
        (19, DeviceKind::Ibta),
        // All credits were used on a peer whose queue pair had failed: no keepalive could find out.
        (1851, DeviceKind::Rxe),
        // Data came while a program took what waited: softsim's descriptor stayed readable, and an
        // endpoint spun.
        (741, DeviceKind::HostileButLegal),
        (1633, DeviceKind::HostileButLegal),
        // Questions in a window of one byte, and receives that are just enough.
        (62, DeviceKind::Rxe),
        // A rogue that slept until its victim had given up counted as having done its deviation.
        (631_408, DeviceKind::Ibta),
        // The memory of a receive was gone where none was posted: an end without a message, and an
        // outage swallowed the rest.
        (655_528, DeviceKind::HostileButLegal),
    ];
    for (seed, device_kind) in found {
        let outcome = attempt(&Scenario::draw(seed, device_kind), false);
        assert_eq!(outcome.violation, None, "seed {seed}, {}", device_kind.name());
    }
}

/// No protocol survives the silent loss of both sides' completion queues, so no scenario has both.
/// As a given plan it shows that an endless run is noticed, and what shrinking leaves.
#[test]
fn a_plan_is_shrunk_to_what_breaks_the_rule_and_told_to_people() {
    let lost = |host| Injection { when: When::Pass(Site::Report, 40), host, fault: Fault::QueueLost };
    let noise = |fault| Injection { when: When::Event(30), host: 0, fault };
    // No run is known to break the simulator's own rules. The test's: not both sides lose queues.
    let breaks = |scenario: &Scenario| {
        let page = timeline::render(&attempt(scenario, true).trace, usize::MAX);
        page.matches("*** FAULT: QueueLost").count() == 2
    };
    let failing = (0..200)
        .map(|seed| Scenario::draw(seed, DeviceKind::Mlx5))
        .filter(|scenario| scenario.connections.len() == 1 && scenario.connections[0].rogue.is_none())
        .filter(|scenario| scenario.connections[0].options.protocol.features == FeatureSet::NONE)
        .map(|scenario| {
            let plan = vec![
                noise(Fault::AddressChange),
                lost(0),
                noise(Fault::Lose),
                lost(1),
                noise(Fault::Spurious),
            ];
            Scenario { plan, ..scenario }
        })
        // In some runs the noise alone triggers the last report at which a queue is lost.
        .find(|scenario| {
            let quiet = Scenario { plan: vec![lost(0), lost(1)], ..scenario.clone() };
            breaks(scenario) && breaks(&quiet)
        })
        .expect("some connection is still busy when both sides lose their queues");
    let least = shrink(failing, breaks);
    let faults: Vec<_> = least.plan.iter().map(|injection| (injection.host, injection.fault)).collect();
    assert_eq!(faults, [(0, Fault::QueueLost), (1, Fault::QueueLost)]);
    let outcome = attempt(&least, true);
    assert!(outcome.violation.is_none(), "both sides are told");
    let page = timeline::render(&outcome.trace, 1000);
    assert_eq!(page.matches("*** FAULT: QueueLost").count(), 2, "{page}");
    assert!(page.contains("RegisterXferMemory"), "{page}");
}

/// A search that runs nothing finds nothing. That must not count as a result.
#[test]
fn a_search_of_nothing_is_refused() {
    for nothing in [["--seeds", "5..5"], ["--seeds", "6..5"], ["--jobs", "0"]] {
        let mut program = std::process::Command::new(env!("CARGO_BIN_EXE_valkey-rdma-trust"));
        let output = program.args(["sim", "--device-kind", "ibta"]).args(nothing).output().unwrap();
        assert_eq!(output.status.code(), Some(suite::exit::USAGE.into()), "{nothing:?}: {output:?}");
    }
}
