//! A Valkey as the target: who may connect, signals, and bounds.

use super::*;

/// Another program that connects first, from the target's address, gets nothing. The target does,
/// and has its own password again.
#[test]
fn only_the_target_gets_the_snapshot() {
    let fake = Fake::start(State { masterauth: MASTERAUTH.into(), ..State::default() });
    let taken = fake.sink(EMPTY, &Stop::default(), LiveSink::mark);
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
    // A program that is killed now leaves a note.
    let name = format!("masterauth-{HISTORY}");
    let note = std::fs::read_to_string(fake.notes.join(name)).expect("a note");
    assert!(note.contains(&password) && note.contains(MASTERAUTH), "{note}");
    let mut target = Guest::connect(primary);
    assert!(target.asks(&["PING"], "+PONG"));
    // With a masteruser it also sends that name.
    assert!(target.asks(&["AUTH", "who", &password], "+OK"));
    assert!(target.asks(&["REPLCONF", "capa", "eof"], "+OK"));
    assert!(target.asks(&["PSYNC", HISTORY, "1"], &format!("+FULLRESYNC {OTHER} 7")));
    target.loads();
    taken.join().expect("no panic").expect("the target is taken");
    let state = fake.state();
    assert_eq!(state.masterauth, MASTERAUTH);
    assert_eq!(state.told, [password, MASTERAUTH.into()]);
    assert_eq!(fake.notes(), 0);
}

/// The target is accepted even if the maximum of other connections exists before it.
#[test]
fn guests_that_say_nothing_do_not_keep_the_target_out() {
    let fake = Fake::start(State::default());
    let taken = fake.sink(EMPTY, &Stop::default(), LiveSink::mark);
    let primary = fake.primary();
    let _silent: Vec<_> = (0..100).map(|_| Guest::connect(primary)).collect();
    let mut target = Guest::connect(primary);
    let password = fake.state().masterauth.clone();
    assert!(target.asks(&["AUTH", &password], "+OK"));
    assert!(target.asks(&["PSYNC", HISTORY, "1"], &format!("+FULLRESYNC {OTHER} 7")));
    target.loads();
    taken.join().expect("no panic").expect("the target is taken");
}

/// A target that refuses `CONFIG` must name its history.
#[test]
fn a_target_without_config_is_known_by_its_history() {
    let fake = Fake::start(State { refuses: vec![("CONFIG", 100)], ..State::default() });
    let taken = fake.sink(EMPTY, &Stop::default(), LiveSink::mark);
    let primary = fake.primary();
    for history in [OTHER, "?", ""] {
        let mut guest = Guest::connect(primary);
        assert!(guest.asks(&["AUTH", "its own"], "+OK"));
        assert!(!guest.asks(&["PSYNC", history, "-1"], ""));
    }
    let mut target = Guest::connect(primary);
    assert!(target.asks(&["PSYNC", HISTORY, "1"], &format!("+FULLRESYNC {OTHER} 7")));
    target.loads();
    taken.join().expect("no panic").expect("the target is taken");
    assert_eq!(fake.state().told, [""; 0]);
}

/// A signal ends a wait for a target that does not connect, and for one that reads nothing more.
#[test]
fn a_signal_ends_every_wait_for_a_target() {
    let short = Duration::from_secs(30);
    let (fake, stop) = (Fake::start(State::default()), Stop::default());
    let waiting = fake.sink(EMPTY, &stop, move |sink| {
        sink.patience.connect = short;
        (sink.mark(), sink.undo())
    });
    fake.primary();
    stop.stop();
    let (marked, undone) = waiting.join().expect("no panic");
    assert!(marked.as_ref().is_err_and(is_stop), "{marked:?}");
    undone.expect("it is undone");
    assert_eq!(fake.state().primary, None);
    assert_eq!(fake.state().masterauth, "");

    let (fake, stop) = (Fake::start(State::default()), Stop::default());
    let value = [b"\x00\x01k\x80", &(64_u32 << 20).to_be_bytes()[..], &vec![0; 64 << 20]].concat();
    let waiting = fake.sink(&summed(b"REDIS0011", &value), &stop, move |sink| {
        sink.patience.load = short;
        let marked = sink.mark();
        sink.patience.load = LONG;
        (marked, sink.undo())
    });
    let _reads_nothing = fake.replica();
    stop.stop();
    let (marked, undone) = waiting.join().expect("no panic");
    assert!(marked.as_ref().is_err_and(is_stop), "{marked:?}");
    undone.expect("it is undone");
    assert_eq!(fake.state().primary, None);
}

/// A target that stalls inside a command, or sends empty lines forever, is given up after its
/// time-out.
#[test]
fn no_wait_for_an_acknowledgement_is_without_bound() {
    for says in [&b"*3\r\n$8\r\nREPLCONF\r\n$3\r\nAC"[..], b"*3\r\n$8\r\n", b"\n"] {
        let fake = Fake::start(State::default());
        let sink = fake.sink(EMPTY, &Stop::default(), |sink| {
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
    let sink = fake.sink(EMPTY, &Stop::default(), |sink| {
        sink.mark().expect("it is acknowledged");
        (sink.end(), sink.undo())
    });
    let mut replica = fake.replica();
    replica.loads();
    let (ended, undone) = sink.join().expect("no panic");
    assert!(ended.is_err());
    undone.expect("it is undone");
    assert_eq!(fake.told.try_iter().collect::<Vec<_>>(), [Told::Detach(false), Told::Detach(true)]);
    assert_eq!(fake.state().primary, None);
}

/// Returns why a target gets nothing of these bytes.
fn refuses(fake: &Fake, rdb: &[u8]) -> String {
    let mut sink = LiveSink::new(fake.target());
    sink.patience = Patience { answer: LONG, connect: Duration::ZERO, load: LONG };
    sink.begin(&offer(), &Stop::default()).expect("it begins");
    // In pieces, as chunks come.
    let written = rdb.chunks(3).try_for_each(|bytes| sink.write(bytes));
    let error = written.and_then(|()| sink.mark()).expect_err("no RDB for it");
    sink.undo().expect("nothing was changed");
    error.to_string()
}

/// VS-READ-007: nothing goes to a target for an RDB that is empty, cut, damaged, without checksum,
/// foreign, or of a version that the target does not take: it is not even told to become a replica.
#[test]
fn a_target_never_sees_a_wrong_rdb() {
    let fake = Fake::start(State::default());
    let mut damaged = summed(b"VALKEY080", b"\x00\x01k\x05value");
    damaged[14] ^= 1;
    for (rdb, why) in [
        (&[][..], "it is cut"),
        (&EMPTY[..17], "it is cut"),
        (&damaged, "it is damaged"),
        (&unsummed(), "it has no checksum"),
        (&[EMPTY, EMPTY].concat(), "bytes follow its end"),
        (b"HTTP/1.1 200 OK\r\n", "it does not begin as an RDB"),
        (&summed(b"REDIS0011", b"\x00\x01k\x80\xff\xff\xff\xffv"), "it is cut"),
        (&summed(b"REDIS0011", b"\xfe\x10"), "database 16"),
        (&summed(b"REDIS0011", b"\x07\x01k\x81\0\0\0\0\0\0\0\0\0"), "the target has no modules"),
    ] {
        let error = refuses(&fake, rdb);
        assert!(error.contains(why), "{error}");
    }
    // One with modules may lack this one. Its user knows.
    fake.state().modules = "module:name=other,ver=1";
    let error = refuses(&fake, &summed(b"REDIS0011", b"\x07\x01k\x81\0\0\0\0\0\0\0\0\0"));
    assert!(error.contains("pass --modules if the target has it"), "{error}");
    fake.state().version = Some('\x0b');
    let error = refuses(&fake, &summed(b"VALKEY080", b""));
    assert!(error.contains("takes RDBs up to version 11"), "{error}");
    assert_eq!(fake.told.try_recv().ok(), None);
    assert_eq!((fake.state().told.len(), fake.notes()), (0, 0));
}

/// The next pull into a target restores the `masterauth` that a killed one has changed. It does not
/// touch one that was set since, or that a living pull has changed.
#[test]
fn a_killed_pull_is_made_good_by_the_next() {
    let prepare = |fake: &Fake| {
        let mut sink = LiveSink::new(fake.target());
        sink.patience = Patience { answer: LONG, connect: LONG, load: LONG };
        sink.prepare(&Stop::default()).expect("it can be filled");
        fake.state().masterauth.clone()
    };
    let name = format!("masterauth-{HISTORY}");
    for (now, expected) in [("ours", MASTERAUTH), ("new", "new")] {
        let fake = Fake::start(State { masterauth: now.into(), ..State::default() });
        let said = Said { changed: "ours".into(), earlier: MASTERAUTH.into() };
        let note = Note::take(&fake.notes, &name, &said).expect("a note").expect("no other");
        assert_eq!((prepare(&fake), fake.notes()), (now.into(), 1));
        // As the end of its process does.
        drop(note);
        assert_eq!((prepare(&fake), fake.notes()), (expected.into(), 0));
    }
}
