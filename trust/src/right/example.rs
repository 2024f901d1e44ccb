//! The example client in C as a client under test. A relay carries its TCP over our own side.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use conformance::blackbox::process::ExecClients;
use conformance::blackbox::target::{Running, TargetClients};
use rdma_conn::{Connect, Descriptors, Options, Stream};

/// How long the relay waits for one side before it checks the other.
const TURN: Duration = Duration::from_millis(1);
const STARTING: Duration = Duration::from_secs(60);

/// Builds the client, which asks for a reply of `long` bytes; `None` where there is no C compiler.
///
/// # Errors
/// It does not compile.
pub(super) fn build(folder: &Path, long: usize) -> Result<Option<PathBuf>, String> {
    let program = folder.join(format!("example-client-{long}"));
    let source = conformance::requirements::workspace()?.join("docs/adopt/client.c");
    let flags = ["-std=c99", "-O1", &format!("-DLONG={long}"), "-o"].map(String::from);
    match Command::new("cc").args(flags).arg(&program).arg(source).status() {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Ok(status) if status.success() => Ok(Some(program)),
        Ok(status) => Err(format!("cc: {status}")),
        Err(error) => Err(format!("cc: {error}")),
    }
}

pub(super) struct Example<B> {
    pub(super) backend: B,
    pub(super) options: Options,
    pub(super) program: PathBuf,
}

impl<B: Descriptors> TargetClients for Example<B> {
    fn start(&self, case: &str, address: SocketAddr) -> Result<Box<dyn Running>, String> {
        let told = |error: std::io::Error| error.to_string();
        let listener = TcpListener::bind("127.0.0.1:0").map_err(told)?;
        let local = listener.local_addr().map_err(told)?;
        listener.set_nonblocking(true).map_err(told)?;
        let command = format!("{} {{host}} {{port}}", self.program.display());
        let running = ExecClients { command, first: 0 }.start(case, local)?;
        let (backend, options) = (self.backend.clone(), self.options);
        std::thread::spawn(move || {
            let begun = Instant::now();
            // The client may fail before it connects.
            while begun.elapsed() < STARTING {
                match listener.accept() {
                    // A failure ends the client's connection, which it reports to the suite.
                    Ok((client, _)) => return drop(carry(&backend, address, options, client)),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(TURN),
                    Err(_) => return,
                }
            }
        });
        Ok(running)
    }
}

fn carry<B: Descriptors>(
    backend: &B,
    address: SocketAddr,
    options: Options,
    mut client: TcpStream,
) -> std::io::Result<()> {
    client.set_nonblocking(false)?;
    // Delays of TCP are not part of the trial.
    client.set_nodelay(true)?;
    client.set_read_timeout(Some(TURN))?;
    let how = Connect::default().timeout(options.handshake_timeout).options(options);
    let mut server = Stream::connect_with(backend, address, &how).map_err(std::io::Error::other)?;
    server.set_read_timeout(Some(TURN));
    let mut chunk = vec![0; 256 << 10];
    let carried = loop {
        match pass(&mut client, &mut server, &mut chunk) {
            // The client has finished, and what it wrote must still arrive.
            Ok(true) => break server.close(options.linger).map_err(std::io::Error::other),
            Ok(false) => {}
            Err(error) => break Err(error),
        }
        match pass(&mut server, &mut client, &mut chunk) {
            Ok(true) => break Ok(()),
            Ok(false) => {}
            Err(error) => break Err(error),
        }
    };
    // The client may have left.
    let _ended = client.shutdown(Shutdown::Both);
    carried
}

/// Passes on what has arrived. Returns true at the end.
fn pass(from: &mut impl Read, to: &mut impl Write, chunk: &mut [u8]) -> std::io::Result<bool> {
    match from.read(chunk) {
        Ok(0) => Ok(true),
        Ok(read) => {
            to.write_all(&chunk[..read])?;
            to.flush()?;
            Ok(false)
        }
        Err(error) => match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => Ok(false),
            _ => Err(error),
        },
    }
}
