// One MXFP8 linear in data parallel, written for one replica: block-scaled product, then a sum over all replicas.
module @mxfp8 attributes {mhlo.num_replicas = $N : i32} {
  func.func @main(%x: tensor<4096x4096xf8E4M3FN>, %xs: tensor<4096x128xf8E8M0FNU>,
                  %w: tensor<16384x4096xf8E4M3FN>, %ws: tensor<16384x128xf8E8M0FNU>) -> tensor<4096x16384xbf16> {
    %y = stablehlo.custom_call @__op$block_scaled_dot(%x, %w, %xs, %ws) {api_version = 2 : i32} : (tensor<4096x4096xf8E4M3FN>, tensor<16384x4096xf8E4M3FN>, tensor<4096x128xf8E8M0FNU>, tensor<16384x128xf8E8M0FNU>) -> tensor<4096x16384xbf16>
    %s = "stablehlo.all_reduce"(%y) ({
      ^bb0(%a: tensor<bf16>, %b: tensor<bf16>):
        %c = stablehlo.add %a, %b : tensor<bf16>
        stablehlo.return %c : tensor<bf16>
    }) {replica_groups = dense<$GROUP> : tensor<1x$Nxi64>} : (tensor<4096x16384xbf16>) -> tensor<4096x16384xbf16>
    return %s : tensor<4096x16384xbf16>
  }
}
