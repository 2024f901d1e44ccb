//! A primary as the source.

use super::*;

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
    answer(&mut asked, &mut admin, 2);
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

/// Valkey's offsets are signed. A larger one is no answer of a primary.
#[test]
fn an_offset_beyond_all_histories_is_no_answer() {
    for (offset, is_one) in [(i64::MAX as u64, true), (i64::MAX as u64 + 1, false), (u64::MAX, false)] {
        let position = crate::valkey::source::position(&format!("+FULLRESYNC {HISTORY} {offset}"));
        assert_eq!(position.map(|position| position.offset), is_one.then_some(offset));
    }
    assert!(crate::valkey::source::position(&format!("+FULLRESYNC {HISTORY} -1")).is_none());
}
