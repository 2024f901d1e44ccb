//! A Valkey, filled as its primary.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket};
use std::time::{Duration, Instant};

use super::link::Link;
use super::{PATIENCE, Server, field};
use crate::reader::{Offer, Position};
use crate::source::Sink;
use crate::wire::Content;

/// How long the target may take to connect, once it was told to.
const CONNECT: Duration = Duration::from_secs(15);

/// How long the target may take for what it was sent: loading an RDB comes before its first word.
const LOAD: Duration = Duration::from_secs(1800);

/// The target's kind, and the changes that are allowed to it.
#[derive(Clone, Debug)]
pub struct Target {
    /// The Valkey.
    pub server: Server,
    /// Whether what it holds may be replaced.
    pub replace: bool,
    /// Where it shall connect to; by default the address from which this machine reaches it.
    pub serve_on: Option<IpAddr>,
}

/// A live target. Dropped before its end, the target is made a primary again, with what it had loaded by then: all of a snapshot or
/// nothing, unless it loads without a disk.
#[derive(Debug)]
pub struct LiveSink {
    target: Target,
    link: Option<Link>,
    mark: [u8; 40],
    /// Where in the history the target will be.
    offset: u64,
    /// Where it says that it is.
    acknowledged: Option<u64>,
    /// Whether it is a replica of ours now.
    attached: bool,
}

impl LiveSink {
    /// A sink into `target`. Nothing is connected.
    #[must_use]
    pub const fn new(target: Target) -> Self {
        Self { target, link: None, mark: [0; 40], offset: 0, acknowledged: None, attached: false }
    }

    /// Refuses a target that cannot take a snapshot, or whose keys would be lost.
    fn check(&self, admin: &mut redis::Connection) -> io::Result<()> {
        let server = &self.target.server;
        let info = server.info(admin, "replication")?;
        if field(&info, "role") != Some("master") {
            return Err(io::Error::other("the target is a replica of somebody else: REPLICAOF NO ONE first"));
        }
        let cluster = server.info(admin, "cluster")?;
        if field(&cluster, "cluster_enabled") == Some("1") {
            return Err(io::Error::other("the target is a cluster node, which takes no REPLICAOF"));
        }
        let keys = server.info(admin, "keyspace")?;
        if !self.target.replace && keys.lines().any(|line| line.starts_with("db")) {
            return Err(io::Error::other("the target is not empty: --replace replaces what it has"));
        }
        let functions: redis::Value =
            redis::cmd("FUNCTION").arg("LIST").query(admin).map_err(|error| server.failed(&error))?;
        let has_functions = matches!(&functions, redis::Value::Array(libraries) if !libraries.is_empty());
        if !self.target.replace && has_functions {
            return Err(io::Error::other("the target has functions: --replace replaces them"));
        }
        Ok(())
    }

    /// Makes the target a replica of ours, up to where it waits for the RDB.
    fn attach(&mut self, position: Position) -> io::Result<()> {
        let server = &self.target.server;
        let address = (server.host.as_str(), server.port).to_socket_addrs()?.next();
        let address = address.ok_or_else(|| io::Error::other(format!("{} has no address", server.host)))?;
        let serve_on = match self.target.serve_on {
            Some(ip) => ip,
            None => way_to(address)?,
        };
        let listener = TcpListener::bind((serve_on, 0))?;
        let port = listener.local_addr()?.port();
        let mut admin = server.admin()?;
        self.check(&mut admin)?;
        self.attached = true;
        replica_of(server, &mut admin, &serve_on.to_string(), &port.to_string())?;
        let stream = accept(&listener, address.ip())?;
        let mut link = Link::new(stream, PATIENCE)?;
        loop {
            let late = || io::Error::new(io::ErrorKind::TimedOut, "the target does not ask for the snapshot");
            let words = link.command()?.ok_or_else(late)?;
            let verb = words.first().map(|verb| verb.to_ascii_uppercase()).unwrap_or_default();
            match verb.as_str() {
                "PING" => link.write_all(b"+PONG\r\n")?,
                // Whatever it has to prove to its primaries, it need not prove here.
                "AUTH" | "REPLCONF" => link.write_all(b"+OK\r\n")?,
                "PSYNC" => break,
                _ => {
                    return Err(io::Error::other(format!(
                        "the target asks for {verb}, which a primary of ours has not"
                    )));
                }
            }
        }
        let history = String::from_utf8_lossy(&position.history).into_owned();
        link.write_all(format!("+FULLRESYNC {history} {}\r\n", position.offset).as_bytes())?;
        let random: [u8; 20] = crate::random().map_err(io::Error::other)?;
        for (pair, byte) in self.mark.chunks_exact_mut(2).zip(random) {
            pair.copy_from_slice(format!("{byte:02x}").as_bytes());
        }
        link.write_all(b"$EOF:")?;
        link.write_all(&self.mark)?;
        link.write_all(b"\r\n")?;
        self.link = Some(link);
        self.offset = position.offset;
        Ok(())
    }

    /// Waits until the target says that it is as far as what it was sent.
    fn settle(&mut self) -> io::Result<()> {
        let Some(link) = &mut self.link else { return Err(io::Error::other("the target was not reached")) };
        let by = Instant::now() + LOAD;
        while self.acknowledged.is_none_or(|acknowledged| acknowledged < self.offset) {
            let words = link.command().map_err(|error| {
                io::Error::new(
                    error.kind(),
                    format!("the target gave up (see its log; is it of an older version?): {error}"),
                )
            })?;
            let words = words.as_ref().map_or(&[][..], |words| words);
            if let [verb, what, offset, ..] = words
                && verb.eq_ignore_ascii_case("REPLCONF")
                && what.eq_ignore_ascii_case("ACK")
            {
                self.acknowledged = offset.parse().ok();
            }
            if Instant::now() >= by {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the target does not say that it has loaded",
                ));
            }
        }
        Ok(())
    }

    /// Makes the target a primary again.
    fn detach(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.attached) {
            let mut admin = self.target.server.admin()?;
            replica_of(&self.target.server, &mut admin, "NO", "ONE")?;
        }
        self.link = None;
        Ok(())
    }

    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some(link) = &mut self.link else { return Err(io::Error::other("the target was not reached")) };
        link.write_all(bytes).map_err(|error| {
            io::Error::new(
                error.kind(),
                format!("the target takes no more (see its log; is its disk full?): {error}"),
            )
        })
    }
}

impl Sink for LiveSink {
    fn begin(&mut self, offer: &Offer) -> io::Result<()> {
        if offer.content != Content::Rdb {
            return Err(io::Error::other("what is published is no RDB: pull it into a file"));
        }
        // An RDB from a file has a history of its own.
        let position = match offer.position {
            Some(position) => position,
            None => {
                let random: [u8; 20] = crate::random().map_err(io::Error::other)?;
                let mut history = [b'0'; 40];
                for (pair, byte) in history.chunks_exact_mut(2).zip(random) {
                    pair.copy_from_slice(format!("{byte:02x}").as_bytes());
                }
                Position { history, offset: 1 }
            }
        };
        self.attach(position)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.send(bytes)?;
        if self.acknowledged.is_some() {
            self.offset += bytes.len() as u64;
        }
        Ok(())
    }

    fn mark(&mut self) -> io::Result<()> {
        let mark = self.mark;
        self.send(&mark)?;
        self.settle()
    }

    fn end(&mut self) -> io::Result<()> {
        self.settle()?;
        self.detach()
    }
}

impl Drop for LiveSink {
    fn drop(&mut self) {
        if let Err(error) = self.detach() {
            tracing::warn!(%error, "the target may still be a replica of ours: REPLICAOF NO ONE makes it a primary");
        }
    }
}

fn replica_of(server: &Server, admin: &mut redis::Connection, host: &str, port: &str) -> io::Result<()> {
    redis::cmd("REPLICAOF").arg(host).arg(port).exec(admin).map_err(|error| server.failed(&error))
}

/// The address from which this machine reaches `target`. Nothing is sent.
fn way_to(target: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr = if target.is_ipv4() { [0; 4].into() } else { [0_u16; 8].into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(target)?;
    Ok(socket.local_addr()?.ip())
}

/// The connection of the target, and of nobody else.
fn accept(listener: &TcpListener, target: IpAddr) -> io::Result<TcpStream> {
    use std::os::fd::AsFd;
    listener.set_nonblocking(true)?;
    let by = Instant::now() + CONNECT;
    loop {
        match listener.accept() {
            Ok((stream, peer)) if peer.ip() == target => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Ok((_, peer)) => tracing::warn!(%peer, "somebody who is not the target was turned away"),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let left = by.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    let what = "the target does not connect: it must reach this machine by TCP (--serve-on names the address)";
                    return Err(io::Error::new(io::ErrorKind::TimedOut, what));
                }
                crate::wait::sleep(&[listener.as_fd()], left).map_err(io::Error::other)?;
            }
            Err(error) => return Err(error),
        }
    }
}
