//! A Valkey as the target: who may connect, signals, and bounds.

use super::*;

/// Another program that connects first, from the target's address, gets nothing. The target does,
/// and has its own password again.
#[test]
fn only_the_target_gets_the_snapshot() {
    let fake = Fake::start(State { masterauth: MASTERAUTH.into(), ..State::default() });
    let taken = fake.sink(&Stop::default(), |_, begun| begun);
    let primary = fake.primary();
    let _silent = Guest::connect(primary);
    for impostor in [
        &[&["PING"][..], &["REPLCONF", "capa", "eof"], &["PSYNC", HISTORY, "1"]][..],
        &[&["PSYNC", "?", "-1"]],
        &[&["AUTH", MASTERAUTH], &["PSYNC", HISTORY, "1"]],
        &[&["AUTH"], &["PSYNC", HISTORY, "1"]],
        &[&["PING"], &["FLUSHALL"]],
    ] {
        let mut guest = Guest::connect(primary);
        for words in impostor {
            let is_heard = guest.asks(words, "+PONG");
            assert_eq!(is_heard, words == &["PING"], "{words:?}");
        }
    }
    let password = fake.state().masterauth.clone();
    assert!(password.len() == 64 && password != MASTERAUTH);
    let mut target = Guest::connect(primary);
    assert!(target.asks(&["PING"], "+PONG"));
    // With a masteruser it also sends that name.
    assert!(target.asks(&["AUTH", "who", &password], "+OK"));
    assert!(target.asks(&["REPLCONF", "capa", "eof"], "+OK"));
    assert!(target.asks(&["PSYNC", HISTORY, "1"], &format!("+FULLRESYNC {OTHER} 7")));
    taken.join().expect("no panic").expect("the target is taken");
    let state = fake.state();
    assert_eq!(state.masterauth, MASTERAUTH);
    assert_eq!(state.told, [password, MASTERAUTH.into()]);
}

/// The target is accepted even if the maximum of other connections exists before it.
#[test]
fn guests_that_say_nothing_do_not_keep_the_target_out() {
    let fake = Fake::start(State::default());
    let taken = fake.sink(&Stop::default(), |_, begun| begun);
    let primary = fake.primary();
    let _silent: Vec<_> = (0..100).map(|_| Guest::connect(primary)).collect();
    let mut target = Guest::connect(primary);
    let password = fake.state().masterauth.clone();
    assert!(target.asks(&["AUTH", &password], "+OK"));
    assert!(target.asks(&["PSYNC", HISTORY, "1"], &format!("+FULLRESYNC {OTHER} 7")));
    taken.join().expect("no panic").expect("the target is taken");
}

/// A target that refuses `CONFIG` must name its history.
#[test]
fn a_target_without_config_is_known_by_its_history() {
    let fake = Fake::start(State { refuses: vec![("CONFIG", 100)], ..State::default() });
    let taken = fake.sink(&Stop::default(), |_, begun| begun);
    let primary = fake.primary();
    for history in [OTHER, "?", ""] {
        let mut guest = Guest::connect(primary);
        assert!(guest.asks(&["AUTH", "its own"], "+OK"));
        assert!(!guest.asks(&["PSYNC", history, "-1"], ""));
    }
    let mut target = Guest::connect(primary);
    assert!(target.asks(&["PSYNC", HISTORY, "1"], &format!("+FULLRESYNC {OTHER} 7")));
    taken.join().expect("no panic").expect("the target is taken");
    assert_eq!(fake.state().told, [""; 0]);
}

/// Returns a sink whose target has all of the snapshot, is loading, and is told to end.
fn stopped_while_loading(fake: &Fake, stop: &Stop) -> JoinHandle<(io::Result<()>, io::Result<()>)> {
    let sink = fake.sink(stop, |sink, begun| {
        begun.expect("it begins");
        sink.write(b"REDIS").expect("it is taken");
        // So that even an unbounded wait ends.
        sink.patience.load = Duration::from_secs(30);
        let marked = sink.mark();
        sink.patience.load = LONG;
        (marked, sink.undo())
    });
    let mut replica = fake.replica();
    replica.reads_all();
    fake.state().is_loading = true;
    stop.stop();
    assert_eq!(fake.told.recv(), Ok(Told::Detach(false)));
    sink
}

/// The first signal ends the wait for a loading target, and makes it a primary as soon as it
/// accepts that.
#[test]
fn a_signal_ends_the_wait_for_a_target_that_loads() {
    let (fake, stop) = (Fake::start(State::default()), Stop::default());
    let sink = stopped_while_loading(&fake, &stop);
    // The command is repeated as often as needed.
    assert_eq!(fake.told.recv(), Ok(Told::Detach(false)));
    fake.state().is_loading = false;
    let (marked, undone) = sink.join().expect("no panic");
    assert!(marked.as_ref().is_err_and(is_stop), "{marked:?}");
    undone.expect("it is undone");
    assert_eq!(fake.state().primary, None);
}

/// The second signal leaves it as it is, and the error says what is left.
#[test]
fn a_second_signal_says_what_is_left() {
    let (fake, stop) = (Fake::start(State::default()), Stop::default());
    let sink = stopped_while_loading(&fake, &stop);
    stop.stop();
    let (_, undone) = sink.join().expect("no panic");
    let primary = fake.state().primary.expect("it is a replica");
    let left = undone.expect_err("it is not undone").to_string();
    assert!(left.contains(&format!("is still a replica of {primary}")), "{left}");
}

/// A signal ends a wait for a target that does not connect, and for one that reads nothing more.
#[test]
fn a_signal_ends_every_wait_for_a_target() {
    let short = Duration::from_secs(30);
    let (fake, stop) = (Fake::start(State::default()), Stop::default());
    let mut sink = LiveSink::new(fake.target());
    sink.patience = Patience { connect: short, load: LONG };
    let theirs = stop.clone();
    let waiting = std::thread::spawn(move || (sink.begin(&offer(), &theirs), sink.undo()));
    fake.primary();
    stop.stop();
    let (begun, undone) = waiting.join().expect("no panic");
    assert!(begun.as_ref().is_err_and(is_stop), "{begun:?}");
    undone.expect("it is undone");
    assert_eq!(fake.state().primary, None);
    assert_eq!(fake.state().masterauth, "");

    let (fake, stop) = (Fake::start(State::default()), Stop::default());
    let waiting = fake.sink(&stop, move |sink, begun| {
        begun.expect("it begins");
        sink.patience.load = short;
        let written = sink.write(&vec![0; 64 << 20]);
        sink.patience.load = LONG;
        (written, sink.undo())
    });
    let _reads_nothing = fake.replica();
    stop.stop();
    let (written, undone) = waiting.join().expect("no panic");
    assert!(written.as_ref().is_err_and(is_stop), "{written:?}");
    undone.expect("it is undone");
    assert_eq!(fake.state().primary, None);
}

/// A target that stalls inside a command, or sends empty lines forever, is given up after its
/// time-out.
#[test]
fn no_wait_for_an_acknowledgement_is_without_bound() {
    for says in [&b"*3\r\n$8\r\nREPLCONF\r\n$3\r\nAC"[..], b"*3\r\n$8\r\n", b"\n"] {
        let fake = Fake::start(State::default());
        let sink = fake.sink(&Stop::default(), |sink, begun| {
            begun.expect("it begins");
            sink.write(b"REDIS").expect("it is taken");
            sink.patience.load = Duration::from_millis(500);
            let marked = sink.mark();
            sink.patience.load = LONG;
            (marked, sink.undo())
        });
        let mut replica = fake.replica();
        replica.reads_all();
        replica.says(says);
        if says == b"\n" {
            while replica.0.get_mut().write_all(says).is_ok() {}
        }
        let (marked, undone) = sink.join().expect("no panic");
        let error = marked.expect_err("it was not acknowledged");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        undone.expect("it is undone");
    }
}

/// A failed step is repeated, and not forgotten before it has succeeded.
#[test]
fn a_target_that_was_not_detached_is_detached_later() {
    let fake = Fake::start(State { refuses: vec![("REPLICAOF NO", 1)], ..State::default() });
    let sink = fake.sink(&Stop::default(), |sink, begun| {
        begun.expect("it begins");
        sink.write(b"REDIS").expect("it is taken");
        sink.mark().expect("it is acknowledged");
        (sink.end(), sink.undo())
    });
    let mut replica = fake.replica();
    replica.reads_all();
    replica.says(&command(&["REPLCONF", "ACK", "7"]));
    let (ended, undone) = sink.join().expect("no panic");
    assert!(ended.is_err());
    undone.expect("it is undone");
    assert_eq!(fake.told.try_iter().collect::<Vec<_>>(), [Told::Detach(false), Told::Detach(true)]);
    assert_eq!(fake.state().primary, None);
}
