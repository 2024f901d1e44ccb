//! Both ends against a scripted Valkey.

mod passwords;
mod primary;
mod target;

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use super::link::{Link, command};
use super::note::{Note, Said};
use super::sink::Patience;
use super::*;
use crate::rdb::tests::{EMPTY, summed, unsummed};
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
    /// The version of its RDBs, if not 80, as a character.
    version: Option<char>,
    /// What it says of its modules.
    modules: &'static str,
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
    notes: PathBuf,
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
        let name = format!("rdma-snapshot-fake-{}-{}", std::process::id(), address.port());
        Self { address, notes: std::env::temp_dir().join(name), state, told }
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
            ["INFO", "server"] => bulk(&format!("run_id:{HISTORY}\r\n")),
            ["INFO", "modules"] => bulk(&format!("{}\r\n", state.modules)),
            ["INFO", _] => bulk("\r\n"),
            // No library, a version, and a checksum.
            ["FUNCTION", "DUMP"] => bulk(&format!("{}\0\0\0\0\0\0\0\0\0", state.version.unwrap_or('P'))),
            ["SELECT", _] => "-ERR DB index is out of range\r\n".into(),
            ["CONFIG", "GET", "masterauth"] => {
                format!("*2\r\n{}{}", bulk("masterauth"), bulk(&state.masterauth))
            }
            ["CONFIG", "GET", "rdbchecksum"] => format!("*2\r\n{}{}", bulk("rdbchecksum"), bulk("yes")),
            ["CONFIG", "SET", "masterauth", password] => {
                state.masterauth = (*password).into();
                state.told.push((*password).into());
                "+OK\r\n".into()
            }
            ["REPLICAOF", "NO", "ONE"] => {
                let _over = told.send(Told::Detach(true));
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
        Target { server, replace: false, modules: false, serve_on: None, notes: self.notes.clone() }
    }

    /// Returns a sink that has this RDB for it, with a thread on which `work` uses the sink.
    fn sink<T: Send + 'static>(
        &self,
        rdb: &[u8],
        stop: &Stop,
        work: impl FnOnce(&mut LiveSink) -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let mut sink = LiveSink::new(self.target());
        sink.patience = Patience { answer: LONG, connect: LONG, load: LONG };
        sink.begin(&offer(), stop).expect("it begins");
        sink.write(rdb).expect("it is kept");
        std::thread::spawn(move || work(&mut sink))
    }

    /// Returns the number of notes about it.
    fn notes(&self) -> usize {
        std::fs::read_dir(&self.notes).map_or(0, Iterator::count)
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

impl Drop for Fake {
    fn drop(&mut self) {
        let _never_written = std::fs::remove_dir_all(&self.notes);
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
        let mut all = vec![0; EMPTY.len() + mark.len()];
        self.0.read_exact(&mut all).expect("all of it");
        assert_eq!(all, [EMPTY, mark.as_bytes()].concat());
    }

    /// Reads all of it, and says that it has loaded it.
    fn loads(&mut self) {
        self.reads_all();
        self.says(&command(&["REPLCONF", "ACK", "7"]));
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
