//! The smoke suite: ordinary work of a client and a server.

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use rdma_conn::{Connect, Descriptors, Stream};
use resp_rs::resp2::Frame;

use crate::Outcome;
use crate::client::{Failure, RespClient, describe};
use crate::resources::{self, ProcessResources};
use crate::workload::{Entry, entries};
use suite::{Case, Stop};

/// The amounts of everything.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Keys to store and read back.
    pub keys: u64,
    /// The connections that share them.
    pub connections: usize,
    /// Commands in the pipeline.
    pub pipeline: usize,
    /// Commands sent to a blocked server.
    pub busy_commands: usize,
    /// The idle time.
    pub idle: Duration,
    /// Connections to open and close.
    pub cycles: usize,
    /// Length of the windows on both sides. The boundary lengths of the values depend on it.
    pub window: usize,
}

/// The place and the amount of the work.
#[allow(missing_docs)] // plain fields
pub struct Setting<B> {
    pub backend: B,
    pub address: String,
    pub connect: Connect,
    pub scale: Scale,
}

/// Returns the cases in order. The first shows that there is a server at all.
pub fn cases<B: Descriptors>() -> Vec<Case<Setting<B>>> {
    vec![
        Case::new("smoke.ping", "connect, PING, close", &["VR-CONN-001"], ping),
        Case::new("smoke.keys", "every key comes back byte for byte", &["VR-FLOW-001", "VR-XFER-001"], keys),
        Case::new(
            "smoke.lent",
            "values sent from registered memory, without a copy",
            &["VR-XFER-001", "VR-XFER-004", "VR-SEC-001"],
            lent,
        ),
        Case::new("smoke.pipeline", "many small commands in one go", &["VR-FLOW-006"], pipeline),
        Case::new(
            "smoke.busy-server",
            "one notification per command to a held server",
            &["VR-FLOW-005"],
            busy,
        ),
        Case::new("smoke.info", "INFO and COMMAND replies arrive whole", &["VR-XFER-004"], info),
        Case::new(
            "smoke.idle",
            "keepalives arrive while idle, then PING",
            &["VR-KEEP-001", "VR-KEEP-002"],
            idle,
        ),
        Case::new("smoke.bgsave", "the connection survives a fork of the server", &["VR-RES-010"], bgsave),
        Case::new("smoke.quit", "+OK arrives before the disconnect", &["VR-CLOSE-001", "VR-CLOSE-002"], quit),
        Case::new(
            "smoke.connect-close",
            "nothing is left of closed connections",
            &["VR-RES-001"],
            connect_close,
        ),
    ]
}

impl<B: Descriptors> Setting<B> {
    fn client(&self) -> Result<RespClient<Stream<B>>, Failure> {
        let mut stream = Stream::connect_with(&self.backend, self.address.as_str(), &self.connect)
            .map_err(Failure::connecting)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)));
        stream.set_write_timeout(Some(Duration::from_secs(60)));
        Ok(RespClient::new(stream))
    }
}

fn ping<B: Descriptors>(setting: &Setting<B>, _: &ProgressBar) -> Outcome {
    let mut client = setting.client()?;
    client.send(&[b"PING"])?;
    client.expect("PONG")?;
    Ok(format!("{} KiB registered", client.stream().registered_bytes() >> 10))
}

fn keys<B: Descriptors>(setting: &Setting<B>, progress: &ProgressBar) -> Outcome {
    let entries = entries(setting.scale.keys, setting.scale.window);
    let bytes: u64 = entries.iter().map(|entry| entry.value_len as u64).sum();
    progress.set_length(2 * bytes);
    let begun = Instant::now();
    let next_share = |connection: usize| entries.iter().skip(connection).step_by(setting.scale.connections);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..setting.scale.connections)
            .map(|connection| scope.spawn(move || store_and_check(setting, next_share(connection), progress)))
            .collect();
        workers.into_iter().try_for_each(|worker| {
            worker.join().unwrap_or_else(|_| Err(Failure::wrong("a client thread panicked")))
        })
    })?;
    let mib = bytes as f64 / f64::from(1 << 20);
    Ok(format!(
        "{} keys on {} connections, {mib:.0} MiB each way, {:.1} s",
        entries.len(),
        setting.scale.connections,
        begun.elapsed().as_secs_f64()
    ))
}

fn store_and_check<'a, B: Descriptors>(
    setting: &Setting<B>,
    entries: impl Iterator<Item = &'a Entry> + Clone,
    progress: &ProgressBar,
) -> Result<(), Failure> {
    let mut client = setting.client()?;
    for entry in entries.clone() {
        client.send(&[b"SET", entry.key().as_bytes(), &entry.value()])?;
        client.expect("OK")?;
        progress.inc(entry.value_len as u64);
    }
    for entry in entries {
        client.send(&[b"GET", entry.key().as_bytes()])?;
        if let Some(difference) = entry.difference(&client.expect_bulk()?) {
            return Err(Failure::wrong(difference));
        }
        progress.inc(entry.value_len as u64);
    }
    Ok(())
}

/// Stores values from registered memory, then by ordinary writes: from which length lending pays.
fn lent<B: Descriptors>(setting: &Setting<B>, progress: &ProgressBar) -> Outcome {
    const TIMES: u32 = 20;
    let lengths = [4 << 10, 64 << 10, 1 << 20, setting.scale.window * 5 / 2];
    progress.set_length(lengths.len() as u64);
    let mut client = setting.client()?;
    let mut told = Vec::new();
    for (number, value_len) in lengths.into_iter().enumerate() {
        let entry = Entry { number: 1 << 40 | number as u64, value_len };
        let (key, value) = (entry.key(), entry.value());
        let begun = Instant::now();
        let mut buffer = client.stream().register_buffer(value_len)?;
        let registering = begun.elapsed();
        if !buffer.write(0, &value) {
            return Err(Failure::wrong("a registered buffer is shorter than it was asked for"));
        }
        let buffer = Arc::new(buffer);

        let begun = Instant::now();
        for _ in 0..TIMES {
            client.send(&[b"SET", key.as_bytes(), &value])?;
            client.expect("OK")?;
        }
        let copied = begun.elapsed() / TIMES;
        client.send(&[b"DEL", key.as_bytes()])?;
        client.reply()?;

        let head = format!("*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n${value_len}\r\n", key.len());
        let begun = Instant::now();
        for _ in 0..TIMES {
            client.stream().write_all(head.as_bytes())?;
            let mut sent = 0;
            while sent < value_len {
                sent += client.stream().lend(&buffer, sent..value_len)?;
            }
            client.stream().write_all(b"\r\n")?;
            client.expect("OK")?;
        }
        let lent = begun.elapsed() / TIMES;
        client.stream().returned(&buffer)?;

        client.send(&[b"GET", key.as_bytes()])?;
        if let Some(difference) = entry.difference(&client.expect_bulk()?) {
            return Err(Failure::wrong(difference));
        }
        let micros = [copied, lent, registering].map(|time| time.as_micros().to_string());
        told.push(format!("{} KiB {}", value_len >> 10, micros.join("/")));
        progress.inc(1);
    }
    let work = client.stream().work();
    let expected = u64::from(TIMES) * lengths.iter().map(|len| *len as u64).sum::<u64>();
    if work.lent != expected {
        return Err(Failure::wrong(format!("{} bytes were lent, not {expected}", work.lent)));
    }
    Ok(format!("us copied/lent/registering: {}", told.join(", ")))
}

fn pipeline<B: Descriptors>(setting: &Setting<B>, progress: &ProgressBar) -> Outcome {
    let count = setting.scale.pipeline;
    let mut client = setting.client()?;
    let mut commands = Vec::new();
    for number in 0..count {
        write!(commands, "*2\r\n$4\r\nPING\r\n$8\r\n{number:08}\r\n")?;
    }
    progress.set_length(count as u64);
    let before = client.stream().counters();
    client.stream().write_all(&commands)?;
    for number in 0..count {
        let echo = client.expect_bulk()?;
        if echo != format!("{number:08}") {
            let echo = String::from_utf8_lossy(&echo);
            return Err(Failure::wrong(format!("reply {number} of {count} is {echo}")));
        }
        progress.inc(1);
    }
    let sent = client.stream().counters().data_notifications_sent - before.data_notifications_sent;
    Ok(format!("{count} commands in {sent} notifications"))
}

/// Returns the reply, or skips the case: servers do not allow every command to every user.
fn allowed(command: &str, reply: Frame) -> Result<Frame, Stop> {
    match &reply {
        Frame::Error(text)
            if text.starts_with(b"NOPERM") || String::from_utf8_lossy(text).contains("not allowed") =>
        {
            let told = String::from_utf8_lossy(text);
            Err(Stop::skipped(format!("the server does not allow {command}, which this takes: {told}")))
        }
        _ => Ok(reply),
    }
}

fn busy<B: Descriptors>(setting: &Setting<B>, progress: &ProgressBar) -> Result<String, Stop> {
    let count = setting.scale.busy_commands;
    progress.set_length(count as u64);
    let (mut holder, mut client) = (setting.client()?, setting.client()?);
    match allowed("DEBUG", holder.call(&[b"DEBUG", b"SLEEP", b"0"])?)? {
        Frame::SimpleString(text) if text == "OK" => {}
        other => return Err(Failure::wrong(format!("DEBUG SLEEP 0 answered {}", describe(&other))).into()),
    }
    holder.send(&[b"DEBUG", b"SLEEP", b"2"])?;
    // Time for the command to arrive. Earlier ones only make the case easier.
    std::thread::sleep(Duration::from_millis(100));
    for _ in 0..count {
        client.send(&[b"PING"])?;
    }
    let most = client.stream().counters().most_in_flight;
    for _ in 0..count {
        client.expect("PONG")?;
        progress.inc(1);
    }
    holder.expect("OK")?;
    Ok(format!("{count} commands, at most {most} notifications unproven"))
}

fn info<B: Descriptors>(setting: &Setting<B>, _: &ProgressBar) -> Outcome {
    let mut client = setting.client()?;
    client.send(&[b"INFO"])?;
    let info = client.expect_bulk()?;
    if !info.windows(9).any(|text| text == b"# Clients") {
        return Err(Failure::wrong("INFO has no section # Clients"));
    }
    match client.call(&[b"COMMAND"])? {
        Frame::Array(Some(commands)) => {
            Ok(format!("{} bytes of INFO, {} commands", info.len(), commands.len()))
        }
        other => Err(Failure::wrong(format!("COMMAND answered {}", describe(&other)))),
    }
}

fn idle<B: Descriptors>(setting: &Setting<B>, progress: &ProgressBar) -> Outcome {
    let mut client = setting.client()?;
    client.send(&[b"PING"])?;
    client.expect("PONG")?;
    progress.set_length(setting.scale.idle.as_secs());
    let begun = Instant::now();
    while begun.elapsed() < setting.scale.idle {
        std::thread::sleep(Duration::from_millis(200));
        progress.set_position(begun.elapsed().as_secs());
    }
    let keepalives = client.stream().counters().keepalives_received;
    // The server sends one every 3 s.
    let expected = (setting.scale.idle.as_secs() / 3).saturating_sub(1).max(1);
    if keepalives < expected {
        return Err(Failure::wrong(format!("{keepalives} keepalives arrived, expected at least {expected}")));
    }
    client.send(&[b"PING"])?;
    client.expect("PONG")?;
    Ok(format!("{keepalives} keepalives in {} s", setting.scale.idle.as_secs()))
}

fn bgsave<B: Descriptors>(setting: &Setting<B>, _: &ProgressBar) -> Result<String, Stop> {
    let mut client = setting.client()?;
    let reply = match allowed("BGSAVE", client.call(&[b"BGSAVE"])?)? {
        Frame::SimpleString(text) => String::from_utf8_lossy(&text).into_owned(),
        other => return Err(Failure::wrong(format!("BGSAVE answered {}", describe(&other))).into()),
    };
    for _ in 0..100 {
        client.send(&[b"PING"])?;
        client.expect("PONG")?;
    }
    Ok(reply)
}

fn quit<B: Descriptors>(setting: &Setting<B>, progress: &ProgressBar) -> Outcome {
    progress.set_length(100);
    for _ in 0..100 {
        let mut client = setting.client()?;
        client.send(&[b"QUIT"])?;
        client.expect("OK")?;
        client.expect_end()?;
        progress.inc(1);
    }
    Ok("100 times".into())
}

fn connect_close<B: Descriptors>(setting: &Setting<B>, progress: &ProgressBar) -> Outcome {
    let cycle = || -> Result<(), Failure> {
        let mut client = setting.client()?;
        client.send(&[b"PING"])?;
        client.expect("PONG")?;
        Ok(client.stream().close(Duration::from_secs(5))?)
    };
    // Once before counting, for what a process opens only once.
    cycle()?;
    resources::settle();
    let before = ProcessResources::now();
    let during = {
        let _open = setting.client()?;
        ProcessResources::now()
    };
    progress.set_length(setting.scale.cycles as u64);
    for _ in 0..setting.scale.cycles {
        cycle()?;
        progress.inc(1);
    }
    let after = resources::await_no_more_than(before);
    if after.exceeds(before) {
        let cycles = setting.scale.cycles;
        return Err(Failure::wrong(format!("before: {before}; after {cycles} cycles: {after}")));
    }
    Ok(format!("{} cycles, then {after}, as before (one connection: {during})", setting.scale.cycles))
}
