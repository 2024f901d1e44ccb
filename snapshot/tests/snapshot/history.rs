//! A history of 100,000 writes in which every moment is recognisable: half of a transaction, or a
//! gap, is no moment of it.

use std::ops::Range;
use std::sync::mpsc;

use redis::{Connection, pipe};

/// Transactions of two writes each.
const PAIRS: i64 = 50_000;

/// Writes the history to `source` and calls `end`, while `replicas` catch up until `is_running`
/// returns false. Each answer must have the beginning of the history, no shorter than before, and
/// all of it at the end. The second half is written once each has shown a part of the first.
pub(crate) fn unfold(
    mut source: Connection,
    replicas: impl IntoIterator<Item = Connection>,
    mut is_running: impl FnMut() -> bool,
    end: impl FnOnce() + Send + 'static,
) {
    let mut watches: Vec<_> = replicas.into_iter().map(Watch::new).collect();
    let (tell, caught_up) = mpsc::channel();
    let writer = std::thread::spawn(move || {
        write(&mut source, 0..PAIRS / 2);
        caught_up.recv().expect("the replicas live");
        write(&mut source, PAIRS / 2..PAIRS);
        end();
    });
    let mut tell = Some(tell);
    while is_running() {
        watches.iter_mut().for_each(Watch::look);
        if watches.iter().all(|watch| watch.last >= 0)
            && let Some(tell) = tell.take()
        {
            tell.send(()).expect("the writer waits");
        }
    }
    drop(tell);
    writer.join().expect("written");
    for watch in &mut watches {
        println!("a part of the history was seen at {} moments", watch.parts);
        watch.look();
        assert_eq!(watch.last, PAIRS - 1);
    }
}

/// Writes a part of the history, 50 transactions at a time.
fn write(source: &mut Connection, pairs: Range<i64>) {
    for batch in pairs.step_by(50) {
        let mut pipe = pipe();
        for index in batch..batch + 50 {
            pipe.atomic().cmd("RPUSH").arg("log").arg(index).ignore();
            pipe.cmd("SET").arg("last").arg(index).ignore();
        }
        pipe.exec(source).expect("written");
    }
}

/// A watched replica.
struct Watch {
    replica: Connection,
    /// The last seen write; -1 for none.
    last: i64,
    /// How often a part of the history was seen, neither none nor all.
    parts: u32,
}

impl Watch {
    const fn new(replica: Connection) -> Self {
        Self { replica, last: -1, parts: 0 }
    }

    /// A Valkey does not answer while it loads.
    fn look(&mut self) {
        let mut moment = pipe();
        moment.atomic().cmd("GET").arg("last").cmd("LRANGE").arg(&["log", "0", "-1"]);
        let Ok((last, log)) = moment.query::<(Option<i64>, Vec<i64>)>(&mut self.replica) else { return };
        let last = last.unwrap_or(-1);
        assert!(last >= self.last, "{last} after {}", self.last);
        assert!(log.iter().copied().eq(0..=last), "{} entries, the last write is {last}", log.len());
        self.last = last;
        self.parts += u32::from((0..PAIRS - 1).contains(&last));
    }
}
