//! What a program observes of its connections: a `tracing` span for each, and counts by role.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use rdma_conn::{Listener, Stream};
use rdma_softsim::Fabric;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::FmtSpan;

/// Every count by its name and role. A gauge keeps the bits of its value.
#[derive(Clone, Default)]
struct Counts(Arc<Mutex<HashMap<String, Arc<AtomicU64>>>>);

impl Counts {
    fn of(&self, key: &Key) -> Arc<AtomicU64> {
        let role = key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect::<String>();
        let mut counts = self.0.lock().expect("no panic");
        Arc::clone(counts.entry(format!("{} {role}", key.name())).or_default())
    }

    fn get(&self, name: &str) -> u64 {
        let counts = self.0.lock().expect("no panic");
        counts.get(name).map_or(0, |count| count.load(Ordering::Relaxed))
    }
}

impl Recorder for Counts {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.of(key))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.of(key))
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

#[derive(Clone, Default)]
struct Printed(Arc<Mutex<Vec<u8>>>);

impl Write for Printed {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no panic").write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Printed {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// One connection of each role that is used and closed, and one to an address without a listener.
#[test]
fn connections_are_counted_and_have_spans() {
    let (counts, printed) = (Counts::default(), Printed::default());
    metrics::set_global_recorder(counts.clone()).expect("the only one");
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_span_events(FmtSpan::CLOSE);
    subscriber.with_writer(printed.clone()).init();

    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener = Listener::bind(&fabric.host(&[address.ip()]), address).expect("a free address");
    let host = fabric.host(&[[192, 0, 2, 2].into()]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // A host and a port may be given separately.
            let mut client = Stream::connect(&host, ("192.0.2.1", 6379)).expect("connects");
            client.write_all(b"hello").expect("written");
            client.close(Duration::from_secs(20)).expect("arrives");
        });
        let (mut server, _) = listener.accept_timeout(Duration::from_secs(20)).expect("accepts");
        let mut heard = String::new();
        server.read_to_string(&mut heard).expect("an end in order");
        assert_eq!(heard, "hello");
    });
    let refused = Stream::connect(&host, "192.0.2.1:1").expect_err("nothing listens there").to_string();

    for role in ["role=client", "role=server"] {
        assert_eq!(counts.get(&format!("rdma_conn_opened_total {role}")), 1, "{role}");
        assert_eq!(counts.get(&format!("rdma_conn_ended_total {role}")), 1, "{role}");
        assert_eq!(f64::from_bits(counts.get(&format!("rdma_conn_open {role}"))), 0.0, "{role}");
    }
    assert_eq!(counts.get("rdma_conn_failed_total role=client"), 1);
    assert_eq!(counts.get("rdma_conn_failed_total role=server"), 0);
    let printed = String::from_utf8(printed.0.lock().expect("no panic").clone()).expect("text");
    let spans: Vec<_> =
        printed.lines().filter(|line| line.contains("rdma connection{") && line.contains("close")).collect();
    assert_eq!(spans.len(), 3, "{printed}");
    let client = "peer=192.0.2.1:6379 role=\"client\"}";
    assert_eq!(spans.iter().filter(|span| span.contains(client)).count(), 1, "{printed}");
    assert!(spans.iter().any(|span| span.contains("role=\"server\"")), "{printed}");
    assert!(spans.iter().any(|span| span.contains(&format!("error={refused}"))), "{printed}");
}
