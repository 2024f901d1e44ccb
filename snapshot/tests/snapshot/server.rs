//! A Valkey server for tests and examples.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rdma_snapshot::valkey::{Server, Target};
use redis::{Connection, cmd};

/// Returns the server that `VALKEY_SERVER` names, or that is installed, or that the lab has built.
fn program() -> Option<PathBuf> {
    let named = std::env::var_os("VALKEY_SERVER").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let installed = std::env::split_paths(&path).map(|folder| folder.join("valkey-server"));
    let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    let built = home.join(".cache/valkey-rdma-lab/valkey/bin/valkey-server");
    named.into_iter().chain(installed).chain([built]).find(|path| path.is_file())
}

/// A Valkey of the test's own.
pub(crate) struct Valkey {
    pub(crate) process: Child,
    port: u16,
    pub(crate) folder: PathBuf,
}

impl Valkey {
    /// Starts it. Prints why and returns `None` if there is no program.
    pub(crate) fn start() -> Option<Self> {
        Self::start_with(&[])
    }

    /// Starts it with these options besides.
    pub(crate) fn start_with(options: &[&str]) -> Option<Self> {
        let Some(program) = program() else {
            println!("skipped: there is no valkey-server; VALKEY_SERVER may name one");
            return None;
        };
        let mut valkey = Self::spawn(&program, options);
        let by = Instant::now() + Duration::from_secs(60);
        while !valkey.answers() {
            assert!(Instant::now() < by, "the server does not answer");
            // Another program was quicker to take its port.
            if valkey.process.try_wait().expect("a process").is_some() {
                valkey = Self::spawn(&program, options);
            }
            std::thread::yield_now();
        }
        Some(valkey)
    }

    fn spawn(program: &Path, options: &[&str]) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("a port").port();
        let folder = std::env::temp_dir().join(format!("rdma-snapshot-valkey-{}-{port}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let process = Command::new(program)
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--dir"])
            .arg(&folder)
            .args(["--save", "", "--enable-debug-command", "yes", "--repl-diskless-sync-delay", "0"])
            .args(options)
            .stdout(Stdio::null())
            .spawn()
            .expect("the server runs");
        Self { process, port, folder }
    }

    pub(crate) fn url(&self) -> String {
        format!("valkey://127.0.0.1:{}", self.port)
    }

    #[allow(dead_code, reason = "one of its users asks")]
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    #[allow(dead_code, reason = "a program of its own asks by URL")]
    pub(crate) fn server(&self) -> Server {
        Server::new(&self.url()).expect("a URL")
    }

    /// Returns it as a target.
    #[allow(dead_code, reason = "one of its users fills it")]
    pub(crate) fn target(&self, replace: bool) -> Target {
        Target {
            server: self.server(),
            replace,
            modules: false,
            serve_on: None,
            notes: self.folder.join("notes"),
        }
    }

    fn answers(&self) -> bool {
        let client = redis::Client::open(self.url()).expect("a URL");
        client.get_connection().is_ok_and(|mut one| cmd("PING").exec(&mut one).is_ok())
    }

    pub(crate) fn connect(&self) -> Connection {
        redis::Client::open(self.url()).expect("a URL").get_connection().expect("a connection")
    }
}

impl Drop for Valkey {
    fn drop(&mut self) {
        let _gone = self.process.kill();
        let _gone = self.process.wait();
        let _gone = std::fs::remove_dir_all(&self.folder);
    }
}
