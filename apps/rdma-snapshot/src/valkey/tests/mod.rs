//! Both ends against a scripted Valkey.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use super::link::{Link, command};
use super::sink::Patience;
use super::*;
use crate::reader::Offer;
use crate::source::{Piece, Sink, Source};
use crate::wait::{Limit, Stop, is_stop};
use crate::wire::{Content, Layout};

/// Longer than any test takes.
const LONG: Duration = Duration::from_secs(600);

/// The target's own history, and another.
const HISTORY: &str = "0123456789abcdef0123456789abcdef01234567";
const OTHER: &str = "ffffffffffffffffffffffffffffffffffffffff";

/// Must never be printed.
const PASSWORD: &str = "s3cret";
const MASTERAUTH: &str = "h1dden";

/// The behaviour of a Valkey.
#[derive(Default)]
struct State {
    password: Option<&'static str>,
    masterauth: String,
    /// Every password for its primaries that it has received.
    told: Vec<String>,
    is_loading: bool,
    /// Commands that it refuses a number of times, repeating them in its answer.
    refuses: Vec<(&'static str, usize)>,
    primary: Option<SocketAddr>,
}

/// A request to a Valkey.
#[derive(Debug, PartialEq, Eq)]
enum Told {
    Attach(SocketAddr),
    /// `REPLICAOF NO ONE`, and whether it was done.
    Detach(bool),
}

/// A Valkey for commands. The test does what it would do as a replica.
struct Fake {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
    told: Receiver<Told>,
}

fn locked(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().expect("no panic")
}

impl Fake {
    fn start(state: State) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("a port");
        let (sender, told) = channel();
        let state = Arc::new(Mutex::new(state));
        let theirs = Arc::clone(&state);
        std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                let (state, sender) = (Arc::clone(&theirs), sender.clone());
                std::thread::spawn(move || Self::serve(stream, &state, &sender));
            }
        });
        Self { address, state, told }
    }

    fn serve(stream: TcpStream, state: &Mutex<State>, told: &Sender<Told>) {
        let mut to = stream.try_clone().expect("a descriptor");
        let mut link = Link::new(stream).expect("a link");
        let limit = Limit::new(&Stop::default(), LONG);
        while let Ok(Some(words)) = link.command(&limit) {
            let words: Vec<_> = words.iter().map(|word| String::from_utf8_lossy(word).into_owned()).collect();
            let words: Vec<_> = words.iter().map(String::as_str).collect();
            let answer = Self::answer(&words, &mut locked(state), told);
            if to.write_all(answer.as_bytes()).is_err() {
                return;
            }
        }
    }

    fn answer(words: &[&str], state: &mut State, told: &Sender<Told>) -> String {
        let all = words.join(" ");
        let refusal = state.refuses.iter_mut().find(|(what, times)| all.starts_with(what) && *times > 0);
        if let Some((_, times)) = refusal {
            *times -= 1;
            if words[0] == "REPLICAOF" {
                let _over = told.send(Told::Detach(false));
            }
            // The answer of a server whose command has another name.
            return format!("-ERR unknown command '{}', with args beginning with: {all}\r\n", words[0]);
        }
        let bulk = |text: &str| format!("${}\r\n{text}\r\n", text.len());
        match words {
            ["AUTH", .., password] if state.password == Some(password) => "+OK\r\n".into(),
            ["AUTH", .., password] => format!("-WRONGPASS {password}\r\n"),
            ["INFO", "replication"] => {
                bulk(&format!("role:master\r\nmaster_replid:{HISTORY}\r\nmaster_repl_offset:1000\r\n"))
            }
            ["INFO", _] => bulk("\r\n"),
            ["FUNCTION", "LIST"] => "*0\r\n".into(),
            ["CONFIG", "GET", name] => format!("*2\r\n{}{}", bulk(name), bulk(&state.masterauth)),
            ["CONFIG", "SET", "masterauth", password] => {
                state.masterauth = (*password).into();
                state.told.push((*password).into());
                "+OK\r\n".into()
            }
            ["REPLICAOF", "NO", "ONE"] => {
                let _over = told.send(Told::Detach(!state.is_loading));
                if state.is_loading {
                    return "-LOADING it is loading the dataset in memory\r\n".into();
                }
                state.primary = None;
                "+OK\r\n".into()
            }
            ["REPLICAOF", host, port] => {
                let primary = format!("{host}:{port}").parse().expect("an address");
                state.primary = Some(primary);
                let _over = told.send(Told::Attach(primary));
                "+OK\r\n".into()
            }
            ["REPLCONF", "ACK", _] => String::new(),
            ["REPLCONF", ..] => "+OK\r\n".into(),
            // Its snapshot of five bytes follows, and no log.
            ["PSYNC", ..] => format!("+FULLRESYNC {HISTORY} 7\r\n$5\r\nREDIS"),
            other => panic!("{other:?}"),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }

    fn server(&self, password: &str) -> Server {
        Server::new(&format!("valkey://who:{password}@{}", self.address)).expect("a URL")
    }

    fn target(&self) -> Target {
        let password = self.state().password;
        let server = match password {
            Some(password) => self.server(password),
            None => Server::new(&format!("valkey://{}", self.address)).expect("a URL"),
        };
        Target { server, replace: false, serve_on: None }
    }

    /// Returns a sink into it, with a thread on which `work` uses it.
    fn sink<T: Send + 'static>(
        &self,
        stop: &Stop,
        work: impl FnOnce(&mut LiveSink, io::Result<()>) -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let mut sink = LiveSink::new(self.target());
        sink.patience = Patience { connect: LONG, load: LONG };
        let stop = stop.clone();
        std::thread::spawn(move || {
            let begun = sink.begin(&offer(), &stop);
            work(&mut sink, begun)
        })
    }

    /// Returns the address that it must connect to.
    fn primary(&self) -> SocketAddr {
        match self.told.recv().expect("the sink goes on") {
            Told::Attach(primary) => primary,
            other => panic!("{other:?}"),
        }
    }

    /// Connects as the Valkey would, and asks for the snapshot.
    fn replica(&self) -> Guest {
        let mut replica = Guest::connect(self.primary());
        let password = self.state().masterauth.clone();
        assert!(replica.asks(&["AUTH", &password], "+OK"));
        assert!(replica.asks(&["PSYNC", HISTORY, "1"], &format!("+FULLRESYNC {OTHER} 7")));
        replica
    }
}

fn offer() -> Offer {
    let position = Some(crate::reader::Position { history: [b'f'; 40], offset: 7 });
    Offer { layout: Layout::Chunks, content: Content::Rdb, chunk_size: 4096, total: None, position }
}

/// A program that connects to a sink.
struct Guest(BufReader<TcpStream>);

impl Guest {
    fn connect(to: SocketAddr) -> Self {
        Self(BufReader::new(TcpStream::connect(to).expect("a listener")))
    }

    /// Returns whether this command has that answer; false if it is rejected.
    fn asks(&mut self, words: &[&str], expected: &str) -> bool {
        // A rejected connection may fail here or at the read.
        let _gone = self.0.get_mut().write_all(&command(words));
        let mut line = String::new();
        match self.0.read_line(&mut line) {
            Ok(0) | Err(_) => false,
            Ok(_) => {
                assert_eq!(line.trim_end(), expected, "{words:?}");
                true
            }
        }
    }

    /// Reads up to the mark after the RDB.
    fn reads_all(&mut self) {
        let mut begin = String::new();
        self.0.read_line(&mut begin).expect("a line");
        let mark = begin.trim_end().strip_prefix("$EOF:").expect("a mark").to_string();
        let mut all = vec![0; "REDIS".len() + mark.len()];
        self.0.read_exact(&mut all).expect("all of it");
        assert_eq!(all, format!("REDIS{mark}").as_bytes());
    }

    fn says(&mut self, bytes: &[u8]) {
        self.0.get_mut().write_all(bytes).expect("a sink");
    }
}

#[test]
fn urls_name_a_server_and_who_asks() {
    let server = Server::new("valkey://who:p%40ss@127.0.0.1:7000").expect("a URL");
    assert_eq!((server.host.as_str(), server.port), ("127.0.0.1", 7000));
    assert_eq!((server.user.as_deref(), server.password.as_deref()), (Some("who"), Some("p@ss")));
    assert!(Server::new("unix:///tmp/socket").is_err());
    assert!(Server::new("nonsense").is_err());
}

#[test]
fn fields_of_info_are_found_by_their_whole_name() {
    let info = "# Replication\r\nrole:master\r\nmaster_repl_offset:12\r\nmaster_replid2:00\r\n";
    assert_eq!(field(info, "role"), Some("master"));
    assert_eq!(field(info, "master_repl_offset"), Some("12"));
    assert_eq!(field(info, "master_replid"), None);
}

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

/// While its log waits, a source tells the primary that it is there, and notices that the primary
/// has ended the link, even behind bytes that were not read.
#[test]
fn a_log_that_waits_keeps_its_primary() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("valkey://{}", listener.local_addr().expect("a port"));
    let opening = Opening { follow: true, ..Opening::default() };
    let opened = std::thread::spawn(move || {
        LiveSource::open(Server::new(&url).expect("a URL"), &opening).expect("a snapshot")
    });
    let answer = |link: &mut Link, to: &mut TcpStream, count| {
        for _ in 0..count {
            let words =
                link.command(&Limit::new(&Stop::default(), LONG)).expect("a link").expect("a command");
            let answer = match &words[0][..] {
                b"INFO" => "$2\r\n\r\n\r\n".to_owned(),
                b"PSYNC" => format!("+FULLRESYNC {HISTORY} 7\r\n$5\r\nREDIS"),
                b"REPLCONF" if words[1] == b"ACK" => String::new(),
                _ => "+OK\r\n".into(),
            };
            to.write_all(answer.as_bytes()).expect("a source");
        }
    };
    let accept = || {
        let (stream, _) = listener.accept().expect("a source");
        (stream.try_clone().expect("a descriptor"), Link::new(stream).expect("a link"))
    };
    let (mut admin, mut asked) = accept();
    answer(&mut asked, &mut admin, 1);
    let (mut to, mut replica) = accept();
    answer(&mut replica, &mut to, 3);
    let mut source = opened.join().expect("no panic");
    let mut bytes = [0; 64];
    assert_eq!(source.read(&mut bytes).expect("a snapshot"), Piece::Bytes(5));
    assert_eq!(source.read(&mut bytes).expect("a snapshot"), Piece::Mark);
    answer(&mut replica, &mut to, 1);
    to.write_all(b"not read").expect("a source");
    let limit = Limit::new(&Stop::default(), LONG);
    while replica.command_now(&Stop::default()).expect("a link").is_none() {
        source.wait().expect("the primary is there");
        std::thread::sleep(limit.nap().expect("it says so within the limit"));
    }
    // It still takes what the source says.
    to.shutdown(Shutdown::Write).expect("a source");
    while source.wait().is_ok() {
        std::thread::sleep(limit.nap().expect("it notices within the limit"));
    }
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

/// A primary that is silent after the end was requested causes an error, not an endless wait.
#[test]
fn a_silent_primary_ends_the_log() {
    let fake = Fake::start(State::default());
    let mut source = LiveSource::open(fake.target().server, &Opening { follow: true, ..Opening::default() })
        .expect("a snapshot");
    let mut bytes = [0; 100];
    assert_eq!(source.read(&mut bytes).expect("the snapshot"), Piece::Bytes(5));
    assert_eq!(source.read(&mut bytes).expect("its end"), Piece::Mark);
    source.stop().expect("it says how far it is");
    source.silence = Duration::from_millis(200);
    let error = loop {
        match source.read(&mut bytes) {
            Ok(piece) => assert_eq!(piece, Piece::Idle),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
}

/// All log output of this thread.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no panic").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// No `Debug`, error or log contains a password: not the URL's, not the target's own, and not the
/// one drawn for the pull.
#[test]
fn no_password_is_printed() {
    let log = Log::default();
    let to = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || to.clone())
        .finish();
    let mut printed = String::new();
    let mut secrets = vec![PASSWORD.to_string(), MASTERAUTH.into()];
    tracing::subscriber::with_default(subscriber, || {
        for url in [
            "valkey://u:s3cret@host:port",
            "valkey://u:s3cret@host:99999999",
            "valkey://u:s3cret@",
            "valkey://u:s3cret@host/s3cret",
            "valkey://u:s3cret%ff@host",
            "valkey://u:s3cret@host?protocol=s3cret",
            "valkey://u:s3cret@[host",
            "valkeys://u:s3cret@host",
            "http://u:s3cret@host",
            "valkey+unix:///socket?pass=s3cret",
        ] {
            let error = Server::new(url).map(drop).err();
            printed += &format!("{error:?} {error:#?} ");
            printed += &error.map_or_else(String::new, |error| error.to_string());
        }
        for (refuses, password) in [
            ("nothing", PASSWORD),
            ("AUTH", PASSWORD),
            ("nothing", "s3cret-that-is-wrong"),
            ("INFO", PASSWORD),
            ("FUNCTION", PASSWORD),
            ("CONFIG", PASSWORD),
            ("CONFIG SET", PASSWORD),
            ("REPLICAOF 127", PASSWORD),
            ("REPLICAOF NO", PASSWORD),
            ("PSYNC", PASSWORD),
        ] {
            let state = State { refuses: vec![(refuses, 100)], ..State::default() };
            let fake =
                Fake::start(State { password: Some(PASSWORD), masterauth: MASTERAUTH.into(), ..state });
            let server = fake.server(password);
            let source = LiveSource::open(server.clone(), &Opening::default());
            printed += &format!("{source:?} {source:#?} ");
            printed += &source.err().map_or_else(String::new, |error| error.to_string());
            let target = Target { server, replace: false, serve_on: None };
            let stop = Stop::default();
            let mut sink = LiveSink::new(target.clone());
            sink.patience = Patience { connect: Duration::ZERO, load: LONG };
            let begun = sink.begin(&offer(), &stop);
            printed += &format!("{sink:?} {sink:#?} {target:?} {:?} ", target.server);
            stop.stop();
            stop.stop();
            for error in [begun, sink.undo()].into_iter().filter_map(Result::err) {
                printed += &format!("{error} {error:?} ");
                let error = crate::Error::sink(error);
                printed += &format!("{error} {error:?} ");
            }
            secrets.append(&mut fake.state().told);
        }
    });
    printed += &String::from_utf8_lossy(&log.0.lock().expect("no panic"));
    assert!(printed.contains("127.0.0.1") && printed.contains("master_replid"), "{printed}");
    for secret in secrets {
        assert!(!printed.contains(&secret), "{secret}: {printed}");
    }
}

/// Valkey's offsets are signed. A larger one is no answer of a primary.
#[test]
fn an_offset_beyond_all_histories_is_no_answer() {
    for (offset, is_one) in [(i64::MAX as u64, true), (i64::MAX as u64 + 1, false), (u64::MAX, false)] {
        let position = super::source::position(&format!("+FULLRESYNC {HISTORY} {offset}"));
        assert_eq!(position.map(|position| position.offset), is_one.then_some(offset));
    }
    assert!(super::source::position(&format!("+FULLRESYNC {HISTORY} -1")).is_none());
}
