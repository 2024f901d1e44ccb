//! A server for the examples, on an RDMA fabric inside the process: the store of `kv-store`, with transactions and with
//! publish and subscribe (RESP2).

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use kv_store::{Frames, Store};
use rdma_conn::{AsyncListener, AsyncStream, Listener, Options};
use rdma_softsim::{Fabric, SoftSim};
use resp_rs::resp2::{Frame, frame_to_bytes};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::broadcast;

/// Where the server listens.
pub const URL: &str = "valkey+rdma://192.0.2.1:6379/0";

type Message = (Bytes, Bytes);

/// A server and a host of the fabric for its clients.
pub fn serve() -> Result<SoftSim, rdma_conn::Error> {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener = Listener::bind(&fabric.host(&[address.ip()]), address, Options::server())?;
    let listener = AsyncListener::new(listener)?;
    let store = Arc::new(Store::default());
    let (news, _) = broadcast::channel(1024);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let session = Session::new(Arc::clone(&store), news.clone());
            tokio::spawn(session.serve(stream));
        }
    });
    Ok(fabric.host(&[[192, 0, 2, 2].into()]))
}

/// One client.
struct Session {
    store: Arc<Store>,
    publish: broadcast::Sender<Message>,
    /// Messages published since this client subscribed to a channel.
    published: Option<broadcast::Receiver<Message>>,
    channels: BTreeSet<Bytes>,
    /// The commands of a transaction that was begun.
    queued: Option<Vec<Frame>>,
    replies: BytesMut,
}

impl Session {
    fn new(store: Arc<Store>, publish: broadcast::Sender<Message>) -> Self {
        let replies = BytesMut::new();
        Self { store, publish, published: None, channels: BTreeSet::new(), queued: None, replies }
    }

    async fn serve(mut self, mut stream: AsyncStream<SoftSim>) -> std::io::Result<()> {
        let mut received = Frames::default();
        let mut chunk = vec![0; 64 << 10];
        loop {
            tokio::select! {
                read = stream.read(&mut chunk) => match read? {
                    0 => return Ok(()),
                    read => received.push(&chunk[..read]),
                },
                (channel, payload) = next(&mut self.published) => if self.channels.contains(&channel) {
                    let said = [bulk("message"), Frame::BulkString(Some(channel)), Frame::BulkString(Some(payload))];
                    self.reply(array(said));
                },
            }
            while let Some(command) = received.take()? {
                self.answer(command);
            }
            stream.write_all(&self.replies.split()).await?;
        }
    }

    fn answer(&mut self, command: Frame) {
        let words = command.clone().into_array().unwrap_or_default().into_iter();
        let words: Vec<Bytes> = words.filter_map(|word| word.into_bulk_string().ok()).collect();
        let Some((name, arguments)) = words.split_first() else { return };
        match (name.to_ascii_uppercase().as_slice(), arguments) {
            (b"MULTI", []) => {
                self.queued = Some(Vec::new());
                self.reply(Frame::SimpleString("OK".into()));
            }
            (b"EXEC", []) => {
                let commands = self.queued.take().unwrap_or_default();
                self.replies.extend_from_slice(format!("*{}\r\n", commands.len()).as_bytes());
                for command in commands {
                    let _quits = self.store.answer(command, &mut self.replies);
                }
            }
            (b"SUBSCRIBE", channels) => {
                self.published.get_or_insert_with(|| self.publish.subscribe());
                for channel in channels {
                    self.channels.insert(channel.clone());
                    let count = i64::try_from(self.channels.len()).unwrap_or(i64::MAX);
                    let channel = Frame::BulkString(Some(channel.clone()));
                    self.reply(array([bulk("subscribe"), channel, Frame::Integer(count)]));
                }
            }
            (b"PUBLISH", [channel, payload]) => {
                let said = self.publish.send((channel.clone(), payload.clone()));
                let heard = said.map_or(0, |sessions| i64::try_from(sessions).unwrap_or(i64::MAX));
                self.reply(Frame::Integer(heard));
            }
            _ => match &mut self.queued {
                Some(queued) => {
                    queued.push(command);
                    self.reply(Frame::SimpleString("QUEUED".into()));
                }
                None => {
                    let _quits = self.store.answer(command, &mut self.replies);
                }
            },
        }
    }

    fn reply(&mut self, frame: Frame) {
        self.replies.extend_from_slice(&frame_to_bytes(&frame));
    }
}

/// Waits for the next message; for ever if there is nothing to wait for.
async fn next(published: &mut Option<broadcast::Receiver<Message>>) -> Message {
    while let Some(receiver) = published {
        match receiver.recv().await {
            Ok(message) => return message,
            // Whoever is too slow misses some.
            Err(broadcast::error::RecvError::Lagged(_)) => {}
            Err(broadcast::error::RecvError::Closed) => *published = None,
        }
    }
    std::future::pending().await
}

fn array(frames: [Frame; 3]) -> Frame {
    Frame::Array(Some(frames.into()))
}

fn bulk(text: &'static str) -> Frame {
    Frame::BulkString(Some(text.into()))
}
