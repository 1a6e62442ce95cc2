use std::fs;
use std::path::PathBuf;

fn main() -> std::io::Result<()> {
    let mut ours: Vec<PathBuf> = fs::read_dir("proto/windrow/v1")?
        .map(|entry| entry.map(|file| file.path()))
        .collect::<Result<_, _>>()?;
    ours.retain(|path| path.extension().is_some_and(|end| end == "proto"));
    tonic_prost_build::configure()
        .build_server(false)
        .extern_path(".google.rpc", "::tonic_types::pb")
        .compile_protos(&ours, &[PathBuf::from("proto")])
}
