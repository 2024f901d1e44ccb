//! The sink's thread, and the digest of the whole.

use std::os::fd::AsFd as _;
use std::sync::mpsc::sync_channel;

use rdma_backend::Backend as _;
use rdma_softsim::Fabric;

use super::*;
use crate::wait::sleep;
use crate::wire::Content;

/// A sink whose thread ends only after its last job was collected.
struct Late(Receiver<()>);

impl Sink for Late {
    fn write(&mut self, _: &[u8]) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Late {
    fn drop(&mut self) {
        let _collected = self.0.recv();
    }
}

/// The end of the sink's thread wakes the thread that waits for it.
#[test]
fn the_end_of_a_sink_is_noticed_at_once() {
    let (collected, late) = sync_channel(1);
    let waker = Waker::new().expect("a waker");
    let mut applying = Applying::begin(Late(late), &Pull::default(), waker.clone()).expect("a thread");
    applying.give(Job::End);
    loop {
        let begun = std::time::Instant::now();
        let most = Duration::from_secs(600);
        sleep(&[waker.as_fd()], most).expect("it sleeps");
        assert!(begun.elapsed() < most, "nothing wakes it");
        waker.clear();
        if applying.collect().expect("no failure") {
            break;
        }
        let _ends = collected.try_send(());
    }
    let _ends = collected.try_send(());
}

/// VS-READ-004: chunks that are right do not make up for another digest of the whole, in
/// whichever of its bytes. Later writes, which may come together with the last chunks, are not
/// part of it.
#[test]
fn a_snapshot_with_another_digest_is_refused() {
    for at in [None, Some(0), Some(31)] {
        let fabric = Fabric::new();
        let [ours, theirs] = [1, 2].map(|host| fabric.host(&[[10, 0, 0, host].into()]));
        let config = publisher::Config::default();
        let mut publisher = Publisher::bind(&theirs, ([10, 0, 0, 2], 0).into(), config).expect("an address");
        let (layout, content) = (Layout::Chunks, Content::Bytes);
        let offer = Offer { layout, content, chunk_size: 10, total: None, position: None };
        publisher.offer(None, offer).expect("an offer");
        publisher.append(b"abc").expect("room");
        publisher.append(b"d").expect("room");
        publisher.mark().expect("a mark");
        if let Some(at) = at {
            publisher.store.log.mark.as_mut().expect("a mark").digest[at] ^= 1;
        }
        publisher.append(b"later").expect("room");
        publisher.end();
        let from = publisher.address();
        let waker = Waker::new().expect("a waker");
        let pulling = std::thread::spawn({
            let waker = waker.clone();
            // It has no job to wait for.
            let (_, late) = channel();
            move || {
                let pulled = pull(&ours, &[from], Late(late), &Pull::default(), &mut |_| {});
                waker.wake();
                pulled
            }
        });
        while !pulling.is_finished() {
            waker.clear();
            publisher.progress().expect("a device");
            publisher.wait(&waker, Some(theirs.now().after(TICK))).expect("it waits");
        }
        let pulled = pulling.join().expect("no panic");
        match at {
            None => assert!(pulled.is_ok(), "{pulled:?}"),
            Some(_) => assert!(matches!(pulled, Err(Error::Digest)), "{pulled:?}"),
        }
    }
}
