// A ring shift, and an exchange of blocks inside groups of 2 with stride 4.
module @exchange attributes {mhlo.num_replicas = $N : i32} {
  func.func @main(%x: tensor<256x64xf32>, %y: tensor<128x64xf32>, %z: tensor<32xf32>) -> (tensor<256x64xf32>, tensor<128x64xf32>, tensor<32xf32>) {
    %0 = "stablehlo.collective_permute"(%x) {source_target_pairs = dense<[[0,1],[1,2],[2,3],[3,4],[4,5],[5,6],[6,7],[7,0]]> : tensor<8x2xi64>} : (tensor<256x64xf32>) -> tensor<256x64xf32>
    %1 = "stablehlo.all_to_all"(%y) {split_dimension = 0 : i64, concat_dimension = 0 : i64, split_count = 2 : i64, replica_groups = dense<[[0,4],[1,5],[2,6],[3,7]]> : tensor<4x2xi64>} : (tensor<128x64xf32>) -> tensor<128x64xf32>
    return %0, %1, %z : tensor<256x64xf32>, tensor<128x64xf32>, tensor<32xf32>
  }
}
