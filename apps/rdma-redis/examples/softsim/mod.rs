//! A server for the examples, on an RDMA fabric inside the process: the store of `kv-store`.

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::BytesMut;
use kv_store::{Frames, Session, Store};
use rdma_conn::{AsyncListener, AsyncStream};
use rdma_softsim::{Fabric, SoftSim};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Notify;

pub const URL: &str = "valkey+rdma://192.0.2.1:6379/0";

pub async fn serve() -> Result<SoftSim, rdma_conn::Error> {
    let fabric = Fabric::new();
    let address = SocketAddr::from(([192, 0, 2, 1], 6379));
    let listener = AsyncListener::bind(&fabric.host(&[address.ip()]), address).await?;
    let store = Arc::new(Store::default());
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(session(stream, Arc::clone(&store)));
        }
    });
    Ok(fabric.host(&[[192, 0, 2, 2].into()]))
}

/// Answers one client until it leaves, and forwards published messages to it.
async fn session(mut stream: AsyncStream<SoftSim>, store: Arc<Store>) -> std::io::Result<()> {
    let published = Arc::new(Notify::new());
    let mut session = Session::with_waker({
        let published = Arc::clone(&published);
        move || published.notify_one()
    });
    let (mut received, mut replies, mut chunk) = (Frames::default(), BytesMut::new(), vec![0; 64 << 10]);
    let mut quits = false;
    while !quits {
        tokio::select! {
            read = stream.read(&mut chunk) => match read? {
                0 => break,
                read => received.push(&chunk[..read]),
            },
            () = published.notified() => session.published(&mut replies),
        }
        while !quits && let Some(command) = received.take()? {
            quits = session.answer(&store, command, &mut replies);
        }
        stream.write_all(&replies.split()).await?;
    }
    stream.shutdown().await
}
