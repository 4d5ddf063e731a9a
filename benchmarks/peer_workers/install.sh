#!/bin/sh
# Make the environment of a peer, runs/peers/NAME: sh benchmarks/peer_workers/install.sh openvino
# or llama.cpp; PYTHON=/path/to/python chooses the interpreter, JOBS the number of compilers.
set -eu

name=${1:-}
root=runs/peers/$name
python=${PYTHON:-python3}

environment() {
    [ -x "$root/bin/python" ] || "$python" -m venv "$root"
    "$root/bin/python" -m pip install --quiet "$@"
}

openvino() {
    environment openvino-genai optimum-intel "torch${TORCH:-}"
    # Text needs no torchvision, and one that does not fit torch breaks transformers' import.
    "$root/bin/python" -m pip uninstall --quiet --yes torchvision
}

# llama-cpp-python's source distribution carries llama.cpp with its server, which it does not build.
llama_cpp() {
    environment gguf numpy safetensors cmake ninja
    source=$root/source
    mkdir -p "$source"
    "$root/bin/python" -m pip download --quiet --no-deps --no-binary llama-cpp-python \
        --dest "$source" "llama-cpp-python${LLAMA_CPP_PYTHON:-}"
    tar -xzf "$source"/llama_cpp_python-*.tar.gz -C "$source"
    PATH=$root/bin:$PATH
    cmake -S "$source"/llama_cpp_python-*/vendor/llama.cpp -B "$root/build" -G Ninja \
        -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \
        -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF
    cmake --build "$root/build" --target llama-server --parallel "${JOBS:-2}"
    cp "$root/build/bin/llama-server" "$root/bin/"
}

case $name in
    openvino) openvino ;;
    llama.cpp) llama_cpp ;;
    vllm) environment vllm ;;
    *) echo "usage: $0 openvino | llama.cpp | vllm" >&2; exit 2 ;;
esac
