// A device whose memory is the host's, for tests without an accelerator. What runs there is the CPU's
// code, but its tensors do not mix with those of the CPU, as on CUDA, and what would make the host wait
// for an accelerator is told to a listener.
//
// Headers one by one, and none of pybind11: <torch/extension.h> alone would take half a minute to compile.

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <set>
#include <string>

namespace {

constexpr auto DEVICE = c10::DeviceType::PrivateUse1;
const c10::Device HERE(DEVICE, 0);

void (*listener)(const char*) = nullptr;  // called with the name of what waits

void waits(const std::string& what) {
  if (listener) listener(what.c_str());
}

struct Memory final : c10::Allocator {
  c10::Device device;
  std::set<void*>* known;
  Memory(c10::Device device, std::set<void*>* known) : device(device), known(known) {}
  static void release(void* pointer) { std::free(pointer); }
  c10::DataPtr allocate(size_t bytes) override {
    void* found = std::malloc(bytes ? bytes : 1);
    if (known) known->insert(found);
    return {found, found, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};
std::set<void*> pinned;
Memory device_memory(HERE, nullptr), pinned_memory(c10::Device(c10::kCPU), &pinned);
REGISTER_ALLOCATOR(DEVICE, &device_memory)

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DEVICE> {
  c10::Device exchangeDevice(c10::Device) const override { return HERE; }
  c10::Device getDevice() const override { return HERE; }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, HERE);
  }
  c10::Stream exchangeStream(c10::Stream) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, HERE);
  }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* data) const override { return pinned.count(const_cast<void*>(data)); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    at::native::resize_bytes_nocuda(storage, bytes);
  }
};

bool is_here(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == DEVICE; }

// The same memory, as the CPU sees it.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!is_here(tensor)) return tensor;
  const auto& storage = tensor.storage();
  c10::Storage shared(
      c10::Storage::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(storage.mutable_data(), c10::Device(c10::kCPU)), c10::GetCPUAllocator(), true);
  at::AutoDispatchBelowADInplaceOrView guard;
  auto found = at::detail::make_tensor<c10::TensorImpl>(
      std::move(shared), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  found.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  found.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  return found;
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (is_here(self) != is_here(source) && source.numel()) {
    const auto& host = is_here(self) ? source : self;
    const bool apart = non_blocking && pinned.count(host.storage().mutable_data());
    if (!(apart && is_here(self))) waits(is_here(self) ? "copy from host" : "copy to host");
  }
  on_host(self).copy_(on_host(source));
  return self;
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto* own = self.unsafeGetTensorImpl();
  own->set_sizes_contiguous(size);
  const size_t bytes = (own->storage_offset() + own->numel()) * self.itemsize();
  auto* storage = own->unsafe_storage().unsafeGetStorageImpl();
  if (storage->nbytes() < bytes) {
    auto more = device_memory.allocate(bytes);
    std::memcpy(more.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(more));
    storage->set_nbytes(bytes);
  }
  return self;
}

bool is_set_to(const at::Tensor& self, const at::Tensor& other) {
  return self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
         self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes() &&
         self.strides() == other.strides();
}

// Tensors of the result, on this device.
at::Tensor brought(const at::Tensor& found, const std::vector<std::pair<at::Tensor, at::Tensor>>& twins) {
  if (!found.defined()) return found;
  for (const auto& [own, twin] : twins) {
    if (!found.is_same(twin)) continue;
    if (own.storage().data() != twin.storage().data()) {  // it was resized
      own.resize_(twin.sizes());
      on_host(own).copy_(twin);
    } else if (own.sizes() != twin.sizes() || own.strides() != twin.strides()) {
      own.unsafeGetTensorImpl()->set_sizes_and_strides(twin.sizes(), twin.strides());
    }
    return own;
  }
  for (const auto& [own, twin] : twins)
    if (found.has_storage() && found.storage().data() == own.storage().data() && found.storage().nbytes())
      return at::native::as_strided_tensorimpl(
          own, found.sizes(), found.strides(), found.storage_offset());
  auto* keeps = new at::Tensor(found.layout() == c10::kStrided ? found : found.contiguous());
  const auto& storage = keeps->storage();
  c10::Storage shared(
      c10::Storage::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(storage.mutable_data(), keeps,
                   [](void* kept) { delete static_cast<at::Tensor*>(kept); }, HERE),
      &device_memory, true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(shared), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), found.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(keeps->sizes(), keeps->strides());
  made.unsafeGetTensorImpl()->set_storage_offset(keeps->storage_offset());
  return made;
}

// What CUDA reads a number of, or how many there are, before it goes on.
const std::set<std::string> WAITING = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount",
    "aten::linalg_eig", "aten::_linalg_svd", "aten::linalg_lstsq", "aten::is_nonzero",
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto name = op.schema().name();
  const auto count = op.schema().arguments().size();
  auto arguments = torch::jit::pop(*stack, count);
  std::vector<std::pair<at::Tensor, at::Tensor>> twins;
  bool any_here = false, any_host = false, masks = false;
  const auto taken = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!is_here(tensor)) {
      any_host |= tensor.dim() > 0;
      return tensor;
    }
    any_here = true;
    auto twin = on_host(tensor);
    twins.emplace_back(tensor, twin);
    return twin;
  };
  for (size_t i = 0; i < count; ++i) {
    auto& each = arguments[i];
    if (each.isTensor()) {
      each = taken(each.toTensor());
    } else if (each.isTensorList()) {
      auto list = c10::List<at::Tensor>();
      for (const at::Tensor& tensor : each.toTensorVector()) list.push_back(taken(tensor));
      each = list;
    } else if (each.isOptionalTensorList()) {
      auto list = c10::List<std::optional<at::Tensor>>();
      for (const auto& tensor : each.toOptionalTensorVector()) {
        masks |= tensor && tensor->defined() && tensor->scalar_type() == c10::kBool;
        list.push_back(tensor ? std::optional<at::Tensor>(taken(*tensor)) : std::nullopt);
      }
      each = list;
    } else if (each.isDevice() && each.toDevice().type() == DEVICE) {
      each = c10::Device(c10::kCPU);
    }
  }
  const bool mixes = any_here && any_host;
  // Indices may be on the host, and are sent then; a mask is first made indices.
  const bool may = name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_";
  TORCH_CHECK(!mixes || may, "tensors of two devices in ", name);
  if (WAITING.count(name) || (may && (masks || mixes))) waits(name);
  for (auto& each : arguments) torch::jit::push(*stack, std::move(each));
  op.callBoxed(stack);
  auto results = torch::jit::pop(*stack, op.schema().returns().size());
  for (auto& each : results) {
    if (each.isTensor()) {
      each = brought(each.toTensor(), twins);
    } else if (each.isTensorList()) {
      auto list = c10::List<at::Tensor>();
      for (const at::Tensor& tensor : each.toTensorVector()) list.push_back(brought(tensor, twins));
      each = list;
    }
    torch::jit::push(*stack, std::move(each));
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("is_set_to", &is_set_to);
  m.impl("resize_", &resize_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
}

const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);

}  // namespace

extern "C" void on_wait(void (*call)(const char*)) { listener = call; }
