use super::*;
use crate::{Local, Op};

/// A post of about so many bytes, with this number.
fn post(id: u64, len: usize) -> Post<'static> {
    let local = Local::Inline(vec![id as u8; len].into());
    Post::Send { pair: 1, work: vec![Send { id, op: Op::Send, signaled: true, solicited: false, local }] }
}

/// Both ends of a ring, from a position on.
fn ends(posts: &Posts, from: u32) -> (Writer, Reader) {
    posts.tail.0.store(from, Relaxed);
    posts.head.0.store(from, Relaxed);
    let writer = Writer { tail: from, head: from, ..Writer::default() };
    (writer, Reader { head: from, tail: from, ..Reader::default() })
}

#[test]
fn posts_come_once_and_in_order() {
    let posts = Box::<Posts>::default();
    let (mut writer, mut reader) = ends(&posts, u32::MAX - WORDS);
    let (mut put, mut taken) = (0, 0);
    while put < 5 * u64::from(WORDS) / 600 {
        // As many as find room; then one makes room for some of them.
        while writer.put(&posts, &post(put, 5000 - put as usize % 9)).expect("a post") {
            put += 1;
        }
        assert!(reader.look(&posts).expect("a tail"));
        assert_eq!(reader.take(&posts).expect("a post"), Some(post(taken, 5000 - taken as usize % 9)));
        taken += 1;
    }
    while let Some(next) = reader.take(&posts).expect("a post") {
        assert_eq!(next, post(taken, 5000 - taken as usize % 9));
        taken += 1;
    }
    assert_eq!((taken, reader.look(&posts).expect("a tail"), reader.has_seen()), (put, false, false));
    let most = post(0, MAX_MESSAGE - 20);
    assert!(writer.put(&posts, &most).expect("a post") && reader.look(&posts).expect("a tail"));
    assert_eq!(reader.take(&posts).expect("a post"), Some(most));
    assert!(matches!(writer.put(&posts, &post(0, MAX_MESSAGE)), Err(Error::TooLong)));
}

/// Positions that skip what no ring holds, or go back.
#[test]
fn posts_are_believed_as_far_as_they_can_be_true() {
    let posts = Box::<Posts>::default();
    for from in [0, u32::MAX - 3] {
        for (tail, possible) in [(0, true), (1, true), (WORDS, true), (WORDS + 1, false), (u32::MAX, false)] {
            let (_, mut reader) = ends(&posts, from);
            posts.tail.0.store(from.wrapping_add(tail), Relaxed);
            assert_eq!(reader.look(&posts).is_ok(), possible, "{tail}");
            posts.tail.0.store(from.wrapping_add(tail).wrapping_sub(1), Relaxed);
            assert_eq!(reader.look(&posts).is_err(), tail != WORDS + 1, "{tail}");
        }
        let most = MAX_MESSAGE as u64;
        for (len, seen) in
            [(0, 1), (1, 1), (8, 1), (9, 2), (most, 8192), (most + 1, WORDS), (u64::MAX, WORDS)]
        {
            let (_, mut reader) = ends(&posts, from);
            posts.from(from).next().expect("a word").store(len, Relaxed);
            posts.tail.0.store(from.wrapping_add(seen), Relaxed);
            assert!(reader.look(&posts).expect("can be true"));
            assert!(reader.take(&posts).is_err(), "{len}");
        }
    }
}

/// Each side writes its word and reads the other's. One of them sees what the other wrote, or a
/// post lies beside a sleeping fabric. Miri tries what processors may do.
#[test]
fn posts_are_seen_or_the_doorbell_rings() {
    let posts = Box::<Posts>::default();
    let (mut writer, mut reader) = ends(&posts, 0);
    for _ in 0..20 {
        let (rings, found) = std::thread::scope(|scope| {
            let program = scope.spawn(|| {
                assert!(writer.put(&posts, &post(7, 20)).expect("a post"));
                posts.needs_doorbell()
            });
            posts.fall_asleep();
            let found = reader.look(&posts).expect("a tail");
            if found {
                posts.wake_up();
            }
            let rings = program.join().expect("a program");
            assert!(reader.look(&posts).expect("a tail"));
            assert_eq!(reader.take(&posts).expect("a post"), Some(post(7, 20)));
            (rings, found)
        });
        assert!(rings || found);
        // It rings once.
        assert!(!posts.needs_doorbell());
    }
}

/// A program that writes anything while the fabric reads.
#[test]
fn posts_that_change_meanwhile_do_no_harm() {
    let posts = Box::<Posts>::default();
    let mut writer = Writer::default();
    let times = if cfg!(miri) { 5 } else { 20_000 };
    let stop = AtomicU32::new(0);
    std::thread::scope(|scope| {
        let (posts, stop) = (&posts, &stop);
        scope.spawn(move || {
            while stop.load(Relaxed) == 0 {
                for (place, word) in posts.words.iter().take(40).zip([9, u64::MAX, 1 << 20, 3].iter().cycle())
                {
                    place.store(*word, Relaxed);
                }
            }
        });
        for _ in 0..times {
            (writer.tail, writer.head) = (0, 0);
            writer.put(posts, &post(7, 250)).expect("a post");
            let mut reader = Reader::default();
            assert!(reader.look(posts).expect("a tail"));
            let _any = reader.take(posts);
            assert!(reader.head <= reader.tail);
        }
        stop.store(1, Relaxed);
    });
}
