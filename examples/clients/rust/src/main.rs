//! Stores a job, works on it and acks it, with stubs generated as docs/clients.md says.
use std::env;
use std::time::Duration;

use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Response, Status};
use tonic_types::StatusExt;
use uuid::Uuid;

use windrow::queue_client::QueueClient;
use windrow::{Ack, AckRequest, DequeueRequest, EnqueueRequest, JobTemplate, NewJob};

pub mod windrow {
    tonic::include_proto!("windrow.v1");
}

const ORG: &str = "acme";
const QUEUE: &str = "cards-rust";
const TRIES_MAX: u32 = 60;
const TRY: Duration = Duration::from_secs(10);
const WAIT: Duration = Duration::from_secs(20);

fn connect(address: &str) -> Result<Channel, tonic::transport::Error> {
    let channel = Endpoint::from_shared(format!("http://{address}"))?
        .connect_timeout(Duration::from_secs(2))
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_timeout(Duration::from_secs(8))
        .keep_alive_while_idle(true)
        .connect_lazy();
    Ok(channel)
}

/// Says whether it is useless to try again. If not, it is safe to try again, because of ids and lease tokens.
fn is_final(code: Code) -> bool {
    matches!(
        code,
        Code::InvalidArgument
            | Code::Unimplemented
            | Code::Unauthenticated
            | Code::PermissionDenied
    )
}

/// Repeats a call until there is an answer. Each try has a deadline of its own.
async fn call<Q: Clone, A>(
    method: impl AsyncFn(Request<Q>) -> Result<Response<A>, Status>,
    message: Q,
    deadline: Duration,
) -> Result<A, Status> {
    let mut pause = Duration::from_millis(50);
    for tries in 1.. {
        let mut request = Request::new(message.clone());
        request.set_timeout(deadline);
        let status = match method(request).await {
            Ok(response) => return Ok(response.into_inner()),
            Err(status) => status,
        };
        if is_final(status.code()) || tries == TRIES_MAX {
            return Err(status);
        }
        eprintln!("another try after {:?}", status.code());
        tokio::time::sleep(pause.mul_f64(rand::random_range(0.5..1.0))).await;
        pause = (2 * pause).min(Duration::from_secs(2));
    }
    unreachable!("the last try returns")
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address = env::var("WINDROW_ADDRESS").unwrap_or("127.0.0.1:7419".to_owned());
    let client = QueueClient::new(connect(&address)?).max_decoding_message_size(16 << 20);
    let enqueue = async |request| client.clone().enqueue(request).await;
    let dequeue = async |request| client.clone().dequeue(request).await;
    let ack = async |request| client.clone().ack(request).await;

    let job = NewJob {
        id: Uuid::now_v7().to_string(),
        template: Some(JobTemplate {
            queue: QUEUE.to_owned(),
            kind: "card".to_owned(),
            payload: b"ada".to_vec(),
            ..Default::default()
        }),
        ..Default::default()
    };
    let request = EnqueueRequest {
        org: ORG.to_owned(),
        jobs: vec![job],
        ..Default::default()
    };
    let stored = call(enqueue, request, TRY).await?;
    println!("stored {}", stored.results[0].id);

    let request = DequeueRequest {
        org: ORG.to_owned(),
        queues: vec![QUEUE.to_owned()],
        wait: Some(WAIT.try_into()?),
        ..Default::default()
    };
    let mut jobs = vec![];
    // Repeat the call: a router that shuts down answers without jobs.
    while jobs.is_empty() {
        jobs = call(&dequeue, request.clone(), WAIT + TRY).await?.jobs;
    }
    for job in jobs {
        println!("a card to {}", String::from_utf8(job.payload)?);
        let acks = vec![Ack {
            lease: job.lease,
            ..Default::default()
        }];
        let acked = call(
            ack,
            AckRequest {
                org: ORG.to_owned(),
                acks,
            },
            TRY,
        )
        .await?;
        println!(
            "acked {}",
            acked.answers().next().unwrap_or_default().as_str_name()
        );
    }

    let bad = NewJob {
        template: Some(JobTemplate {
            queue: "?".to_owned(),
            kind: "card".to_owned(),
            ..Default::default()
        }),
        ..Default::default()
    };
    let request = EnqueueRequest {
        org: ORG.to_owned(),
        jobs: vec![bad],
        ..Default::default()
    };
    if let Err(status) = call(enqueue, request, TRY).await {
        if let Some(bad) = status.get_details_bad_request() {
            println!("refused {}", bad.field_violations[0].field);
        }
    }
    Ok(())
}
