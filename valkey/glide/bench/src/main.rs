//! Requests a second of GLIDE's core: tasks that share the one stream of a standalone client.
//!
//! `glide-bench HOST PORT TRANSPORT RUNTIME TASKS REQUESTS LARGE` makes REQUESTS SETs of 16 bytes
//! from TASKS tasks over `tcp` or `rdma`. RUNTIME is `current`, or the number of worker threads.
//! LARGE is a length of a value that is set and read before, or 0. It prints one line: requests a
//! second, and microseconds of this process's processor time for each, split into user and system.

#![forbid(unsafe_code)]

use std::env;
use std::error::Error;
use std::time::{Duration, Instant};

use glide_core::client::{Client, ConnectionRequest, NodeAddress, Transport};
use redis::{Value, cmd};
use tokio::runtime::Builder;

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = env::args().skip(1).collect();
    let [host, port, transport, runtime, tasks, requests, large] = words.as_slice() else {
        return Err("glide-bench HOST PORT tcp|rdma current|WORKERS TASKS REQUESTS LARGE".into());
    };
    let transport = match transport.as_str() {
        "tcp" => Transport::Tcp,
        "rdma" => Transport::Rdma,
        other => return Err(format!("there is no transport {other}").into()),
    };
    let address = NodeAddress { host: host.clone(), port: port.parse()?, unix_socket_path: None };
    let request = ConnectionRequest {
        addresses: vec![address],
        transport,
        connection_timeout: Some(60_000),
        request_timeout: Some(60_000),
        tcp_nodelay: true,
        ..Default::default()
    };
    let runtime = match runtime.as_str() {
        "current" => Builder::new_current_thread().enable_all().build()?,
        workers => Builder::new_multi_thread().worker_threads(workers.parse()?).enable_all().build()?,
    };
    runtime.block_on(run(request, tasks.parse()?, requests.parse()?, large.parse()?))
}

async fn run(
    request: ConnectionRequest,
    tasks: usize,
    requests: usize,
    large: usize,
) -> Result<(), Box<dyn Error>> {
    let mut client = Client::new(request, None).await.map_err(|error| format!("{error}"))?;
    if large > 0 {
        let value = vec![7; large];
        client.send_command(cmd("SET").arg("large").arg(&value), None).await?;
        let got = client.send_command(cmd("GET").arg("large"), None).await?;
        if !matches!(&got, Value::BulkString(bytes) if bytes[..] == value[..]) {
            return Err("the large value came back changed".into());
        }
    }
    // Not measured: what is allocated and learnt once.
    sets(&client, tasks, requests / 10).await?;
    let (begun, used) = (Instant::now(), processor_time()?);
    let done = sets(&client, tasks, requests).await?;
    let (took, now) = (begun.elapsed(), processor_time()?);
    #[allow(clippy::cast_precision_loss, reason = "a figure to read")]
    let each = |time: Duration| time.as_secs_f64() * 1e6 / done as f64;
    println!("{:.0} {:.1} {:.1}", 1e6 / each(took), each(now.0 - used.0), each(now.1 - used.1));
    Ok(())
}

/// Makes requests, an equal share by each task. Returns how many.
async fn sets(client: &Client, tasks: usize, requests: usize) -> Result<usize, Box<dyn Error>> {
    let share = requests.div_ceil(tasks);
    let running: Vec<_> = (0..tasks)
        .map(|task| {
            let mut client = client.clone();
            tokio::spawn(async move {
                let key = format!("key.{task}");
                for _ in 0..share {
                    let reply = client.send_command(cmd("SET").arg(&key).arg("sixteen bytes...."), None).await?;
                    if reply != Value::Okay {
                        return Err(redis::RedisError::from((redis::ErrorKind::ResponseError, "not OK")));
                    }
                }
                Ok(())
            })
        })
        .collect();
    for task in running {
        task.await??;
    }
    Ok(share * tasks)
}

/// User and system time of this process.
fn processor_time() -> Result<(Duration, Duration), Box<dyn Error>> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    // Behind the name, which may contain anything, state is the third field, utime and stime the
    // 14th and 15th, in ticks, of which Linux always counts 100 a second.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let time = |field: usize| {
        let ticks: u64 = fields.get(field - 3).ok_or("/proc/self/stat is too short")?.parse()?;
        Ok::<_, Box<dyn Error>>(Duration::from_millis(10 * ticks))
    };
    Ok((time(14)?, time(15)?))
}
